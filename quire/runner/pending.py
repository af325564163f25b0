"""Pending: a step's result on its way back. `result()` waits for that step only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.runner.masks import StepMask
from quire.runner.pooling import PooledPart
from quire.runner.span import Span
from quire.sample.inputs import SampledLogprobs, SampleOutput
from quire.spec.verify import verified, verified_path
from quire.step import StepResult, TokenLogprobs, Work


class PromptPart(NamedTuple):
    """Prompt logprobs of one work's positions, still on the device."""

    work: int
    num: int  # how many top tokens were asked for
    targets: Tensor  # [positions] the prompt tokens that follow
    logprobs: SampledLogprobs


class Run(NamedTuple):
    """What one work drew, as far as it counts."""

    work: int
    samples: Sequence[int]  # among all of the step
    tokens: Sequence[int]


class Draw(NamedTuple):
    """The tokens of a step, still on the device, and what the host must know to read them."""

    works: Sequence[int]  # for each sample the work that drew it
    output: SampleOutput
    num_logprobs: Sequence[int | None]  # for each of them, when there are logprobs
    mask: StepMask | None
    drafts: Tensor | None = None  # for each sample the draft in its place, if the runner made any


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


class GivenUpStep:
    """A step that ended in the middle."""

    def result(self) -> StepResult:
        return StepResult((), is_given_up=True)


class PendingStep:
    """Built right after launch; everything it needs from the device is already being copied."""

    def __init__(
        self,
        works: tuple[Work, ...],
        draw: Draw | None = None,
        prompts: Sequence[PromptPart] = (),
        pooled: Sequence[PooledPart] = (),
        span: Span | None = None,
    ) -> None:
        """`span`: of the step so far, where somebody asks how long it takes."""
        self.works, self.draw, self._span = works, draw, span
        self.prompt_nums = [(p.work, p.num) for p in prompts]
        self.pooled_works = [p.work for p in pooled]
        parts: list[Tensor] = []
        if draw is not None:
            parts.append(draw.output.tokens)
            if draw.drafts is not None:
                parts.append(draw.drafts)
            if draw.output.logprobs is not None:
                parts += _tensors_of(draw.output.logprobs)
        for prompt in prompts:
            parts += [prompt.targets, *_tensors_of(prompt.logprobs)]
        parts += [part.embedding for part in pooled]
        self.copy = HostCopy.start(parts)
        if span is not None:
            span.close()
        self._tokens: list[int] | None = None  # once they have arrived
        self._kept: dict[int, Sequence[int]] | None = None  # the same, by work

    def tokens(self) -> list[int]:
        """Wait, and return the token of each sample."""
        if self._tokens is None:
            self._tokens = self.copy.wait()[0].tolist() if self.draw is not None else []
        return self._tokens

    def kept(self, work: int) -> Sequence[int]:
        """Wait, and return the tokens of one work that count."""
        if self._kept is None:
            self._kept = {run.work: run.tokens for run in self.runs()}
        return self._kept[work]

    def runs(self) -> Iterator[Run]:
        """Wait, and return the samples that count; where there are drafts, not all do."""
        if self.draw is None:
            return
        tokens, samples = self.tokens(), self.draw.works
        made = self.copy.wait()[1].tolist() if self.draw.drafts is not None else []
        first = 0
        while first < len(samples):
            index = samples[first]
            work, end = self.works[index], first + 1 + self.works[index].num_drafts
            drafts, drawn = work.drafts or made[first : end - 1], tokens[first:end]
            if work.parents:
                nodes = verified_path(drawn, drafts, work.parents)
                yield Run(index, [first + i for i in nodes], [drawn[i] for i in nodes])
            else:
                kept = verified(drawn, drafts)
                yield Run(index, range(first, first + len(kept)), kept)
            first = end

    def result(self) -> StepResult:
        parts = iter(self.copy.wait())
        sampled: list[Sequence[int]] = [()] * len(self.works)
        logprobs: list[Sequence[TokenLogprobs]] | None = None
        failed: dict[int, str] = {}
        draw = self.draw
        if draw is not None:
            next(parts)  # the tokens
            if draw.drafts is not None:
                next(parts)
            if draw.mask is None and len(draw.works) == len(set(draw.works)):  # no drafts
                for index, token in zip(draw.works, self.tokens(), strict=True):
                    sampled[index] = (token,)
            else:
                failed = self._fill_runs(draw, sampled)
            if draw.output.logprobs is not None:
                logprobs = [()] * len(self.works)
                columns = [next(parts) for _ in range(4)]
                rows = _records(self.tokens(), columns, draw.num_logprobs)
                for index, samples, _ in self.runs():
                    records = [rows[i] for i in samples[: len(sampled[index])]]
                    logprobs[index] = tuple(record for record in records if record is not None)
        prompts: dict[int, list[TokenLogprobs]] = {}
        for work, num in self.prompt_nums:
            targets = next(parts).tolist()
            records = _records(targets, [next(parts) for _ in range(4)], [num] * len(targets))
            prompts[work] = [r for r in records if r is not None]
        pooled = {work: next(parts).tolist() for work in self.pooled_works}
        extras = (prompts or None, pooled or None, failed or None, self._branches() or None)
        seconds = None if self._span is None else self._span.seconds()
        return StepResult(sampled, logprobs, *extras, seconds=seconds)

    def _branches(self) -> dict[int, Sequence[int]]:
        """Which drafts of each tree were right."""
        if not any(work.parents for work in self.works):
            return {}
        # Samples of a work lie side by side, that of the newest known token first.
        return {
            run.work: [sample - run.samples[0] for sample in run.samples[1:]]
            for run in self.runs()
            if self.works[run.work].parents
        }

    def _fill_runs(self, draw: Draw, sampled: list[Sequence[int]]) -> dict[int, str]:
        """What each work drew, up to what its grammar forbids; returns whom it stopped, and why."""
        failed: dict[int, str] = {}
        bad = draw.mask.failures(self.tokens()) if draw.mask is not None else {}
        for index, samples, kept in self.runs():
            count = next((i for i, sample in enumerate(samples) if sample in bad), None)
            if count is not None:
                failed[index] = bad[samples[count]]
            sampled[index] = tuple(kept[:count])
        return failed


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
