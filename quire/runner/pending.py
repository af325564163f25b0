"""Pending: a step's result on its way back. `result()` waits for that step only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.runner.masks import StepMask
from quire.runner.pooling import PooledPart
from quire.sample.inputs import SampledLogprobs, SampleOutput
from quire.step import StepResult, TokenLogprobs, Work


class PromptPart(NamedTuple):
    """Prompt logprobs of one work's positions, still on the device."""

    work: int
    num: int  # how many top tokens were asked for
    targets: Tensor  # [positions] the prompt tokens that follow
    logprobs: SampledLogprobs


class Draw(NamedTuple):
    """The tokens of a step, still on the device, and what the host must know to read them."""

    works: Sequence[int]  # the works that sampled
    output: SampleOutput
    num_logprobs: Sequence[int | None]  # for each of them, when there are logprobs
    mask: StepMask | None


@dataclass(slots=True)
class HostCopy:
    """Device tensors copied to pinned memory without waiting."""

    tensors: list[Tensor]
    done: torch.cuda.Event | None

    @staticmethod
    def start(tensors: Sequence[Tensor]) -> HostCopy:
        if not tensors or tensors[0].device.type != "cuda":
            return HostCopy(list(tensors), None)
        host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for target, source in zip(host, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return HostCopy(host, done)

    def wait(self) -> list[Tensor]:
        if self.done is not None:
            self.done.synchronize()
        return self.tensors


class PendingStep:
    """Built right after launch; everything it needs from the device is already being copied."""

    def __init__(
        self,
        works: tuple[Work, ...],
        draw: Draw | None = None,
        prompts: Sequence[PromptPart] = (),
        pooled: Sequence[PooledPart] = (),
    ) -> None:
        self.works, self.draw = works, draw
        self.prompt_nums = [(p.work, p.num) for p in prompts]
        self.pooled_works = [p.work for p in pooled]
        parts: list[Tensor] = []
        if draw is not None:
            parts.append(draw.output.tokens)
            if draw.output.logprobs is not None:
                parts += _tensors_of(draw.output.logprobs)
        for prompt in prompts:
            parts += [prompt.targets, *_tensors_of(prompt.logprobs)]
        parts += [part.embedding for part in pooled]
        self.copy = HostCopy.start(parts)
        self._tokens: list[int] | None = None  # once they have arrived

    def tokens(self) -> list[int]:
        """Wait, and return one token for each work that sampled."""
        if self._tokens is None:
            self._tokens = self.copy.wait()[0].tolist() if self.draw is not None else []
        return self._tokens

    def result(self) -> StepResult:
        parts = iter(self.copy.wait())
        sampled: list[Sequence[int]] = [()] * len(self.works)
        logprobs: list[Sequence[TokenLogprobs]] | None = None
        failed: dict[int, str] = {}
        draw = self.draw
        if draw is not None:
            tokens = self.tokens()
            next(parts)  # the tokens, taken above
            failed = draw.mask.failures(tokens) if draw.mask is not None else failed
            for index, token in zip(draw.works, tokens, strict=True):
                sampled[index] = () if index in failed else (token,)
            if draw.output.logprobs is not None:
                logprobs = [()] * len(self.works)
                rows = _records(tokens, [next(parts) for _ in range(4)], draw.num_logprobs)
                for index, record in zip(draw.works, rows, strict=True):
                    logprobs[index] = () if record is None or index in failed else (record,)
        prompts: dict[int, list[TokenLogprobs]] = {}
        for work, num in self.prompt_nums:
            targets = next(parts).tolist()
            records = _records(targets, [next(parts) for _ in range(4)], [num] * len(targets))
            prompts[work] = [r for r in records if r is not None]
        pooled = {work: next(parts).tolist() for work in self.pooled_works}
        return StepResult(sampled, logprobs, prompts or None, pooled or None, failed or None)


def _tensors_of(logprobs: SampledLogprobs) -> list[Tensor]:
    return [logprobs.chosen, logprobs.chosen_rank, logprobs.top_tokens, logprobs.top_values]


def _records(
    tokens: list[int], parts: list[Tensor], nums: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    chosen, rank, top_tokens, top_values = (part.tolist() for part in parts)
    return [
        None
        if num is None
        else TokenLogprobs(
            token, chosen[i], rank[i], tuple(top_tokens[i][:num]), tuple(top_values[i][:num])
        )
        for i, (token, num) in enumerate(zip(tokens, nums, strict=True))
    ]
