"""Pending: a step's result on its way back. `result()` waits for that step only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.sample.inputs import SampledLogprobs
from quire.step import StepResult, TokenLogprobs, Work


class PromptPart(NamedTuple):
    """Prompt logprobs of one work's positions, still on the device."""

    work: int
    num: int  # how many top tokens were asked for
    targets: Tensor  # [positions] the prompt tokens that follow
    logprobs: SampledLogprobs


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
        sampled: Sequence[int],
        num_logprobs: Sequence[int | None],
        tokens: Tensor | None,
        logprobs: SampledLogprobs | None,
        prompts: Sequence[PromptPart],
    ) -> None:
        self.works, self.sampled, self.num_logprobs = works, sampled, num_logprobs
        self.prompt_nums = [(p.work, p.num) for p in prompts]
        self.has_logprobs = logprobs is not None
        parts: list[Tensor] = [] if tokens is None else [tokens]
        if logprobs is not None:
            parts += _tensors_of(logprobs)
        for prompt in prompts:
            parts += [prompt.targets, *_tensors_of(prompt.logprobs)]
        self.copy = HostCopy.start(parts)

    def result(self) -> StepResult:
        parts = iter(self.copy.wait())
        sampled: list[Sequence[int]] = [()] * len(self.works)
        logprobs: list[Sequence[TokenLogprobs]] | None = None
        tokens: list[int] = []
        if self.sampled:
            tokens = next(parts).tolist()
            for index, token in zip(self.sampled, tokens, strict=True):
                sampled[index] = (token,)
        if self.has_logprobs:
            logprobs = [()] * len(self.works)
            rows = _records(tokens, [next(parts) for _ in range(4)], self.num_logprobs)
            for index, record in zip(self.sampled, rows, strict=True):
                logprobs[index] = () if record is None else (record,)
        prompts: dict[int, list[TokenLogprobs]] = {}
        for work, num in self.prompt_nums:
            targets = next(parts).tolist()
            records = _records(targets, [next(parts) for _ in range(4)], [num] * len(targets))
            prompts[work] = [r for r in records if r is not None]
        return StepResult(sampled, logprobs, prompts or None)


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
