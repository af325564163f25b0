"""Runners of ranks that hold a model together: all execute the same plans, one draws the tokens.

The first rank announces each plan before it executes it, draws, and tells the others what was
drawn. They write it into their rows and need no grammar, no penalties and no luck to agree. Where
steps replay graphs, the plan says which one (`joint_graphs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.dist.comm import Comm
from quire.errors import RankLost
from quire.forward import StateReads
from quire.runner.drafts import drafts_of
from quire.runner.joint_graphs import as_told, end_graphs
from quire.runner.prompt_parts import PromptReader
from quire.runner.runner import ModelRunner
from quire.runner.step_forms import form_for_all
from quire.sample.inputs import SampleInputs, SampleOutput
from quire.sample.ops import SampleOps
from quire.sample.sampler import Sampler
from quire.step import Pending, StepPlan, StepResult


class Others(NamedTuple):
    """The ranks behind the first."""

    announce: Callable[[StepPlan], None]  # before a plan is executed
    rebalance: Callable[[], None]  # before experts move
    give_prompts: Callable[[bool], None]  # whether the first one reads prompts in its own way
    hand_over: Callable[[bool], None]  # whether hidden states of every token are read here
    settle: Callable[[], None]  # before the oldest step of those launched is drawn, in stages
    lost: Callable[[BaseException], RankLost]  # they cannot go on; returns what to raise


class FirstRunner(ModelRunner):
    """Of the rank that schedules."""

    def __init__(self, others: Others, comm: Comm, *parts: Any) -> None:
        super().__init__(*parts)
        self._others, self._comm = others, comm
        self.sampler = TellingSampler(self.sampler.ops, comm)

    def execute(self, plan: StepPlan) -> Pending:
        plan = self._announce(plan)
        with self._together(), as_told(self.graphs, plan.form):
            return self._checked(super().execute(plan))

    def _checked(self, pending: Pending) -> Pending:
        """On a GPU a collective may fail when the step has long been launched."""
        is_late = self.model.device.type == "cuda" and not self.model.ranks.is_alone
        return CheckedStep(pending, self._comm, self._together) if is_late else pending

    def _announce(self, plan: StepPlan) -> StepPlan:
        """Between two steps: experts move if it is time; then everybody hears of the plan, and of
        the form its step takes where there are several."""
        if self.balancer is not None and self.balancer.is_due():
            self._others.rebalance()
            with self._together():
                self.balancer.rebalance()
        if self.graphs is not None:
            plan = replace(plan, form=form_for_all(self, plan))
        self._others.announce(plan)
        return plan

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Whatever goes wrong here ends the group."""
        try:
            yield
        except BaseException as error:
            end_graphs(self.graphs)
            # Wherever it came from, the others are in the middle of a step that will not end.
            lost = self._others.lost(error)
            if not isinstance(error, Exception):
                raise
            raise lost from error

    def give_prompts(self, reader: PromptReader | None) -> None:
        super().give_prompts(reader)
        self._others.give_prompts(reader is not None)

    def hand_over(self, reads: StateReads) -> None:
        super().hand_over(reads)
        self._others.hand_over(not reads.leaves_tail(self.model.spec.num_layers))

    def _make_drafts(self, plan: StepPlan, sent: dict[str, Tensor]) -> Tensor | None:
        made = super()._make_drafts(plan, sent)
        if made is not None:
            self._comm.tell(self.rows.tokens[drafted(plan)])
        return made


class CheckedStep:
    """`step.Pending`: a result that counts if everybody was there to the end."""

    def __init__(
        self, pending: Pending, comm: Comm, together: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._pending, self._comm, self._together = pending, comm, together

    def result(self) -> StepResult:
        with self._together():
            result = self._pending.result()
            self._comm.check()
        return result


class OtherRunner(ModelRunner):
    def __init__(self, comm: Comm, *parts: Any) -> None:
        super().__init__(*parts)
        self._comm, self.sampler = comm, ToldSampler(self.sampler.ops, comm)

    def execute(self, plan: StepPlan) -> Pending:
        with as_told(self.graphs, plan.form):
            return super().execute(plan)

    def _make_drafts(self, plan: StepPlan, sent: dict[str, Tensor]) -> Tensor | None:
        """The first rank has what makes them."""
        at = drafted(plan)
        if not len(at[0]):
            return None
        tokens = torch.empty(len(at[0]), dtype=torch.int32, device=self.rows.tokens.device)
        self._comm.tell(tokens)
        self.rows.tokens.index_put_(at, tokens)
        return drafts_of(self.rows, sent)


def drafted(plan: StepPlan) -> tuple[Tensor, Tensor]:
    """Rows and positions of all drafts that the plan leaves to the runner."""
    places = [
        (work.row, position)
        for work in plan.works
        if work.num_drafts and not work.drafts
        for position in range(
            work.start + work.num_tokens - work.num_drafts, work.start + work.num_tokens
        )
    ]
    rows, positions = zip(*places, strict=True) if places else ((), ())
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64)


class TellingSampler(Sampler):
    def __init__(self, ops: SampleOps, comm: Comm) -> None:
        super().__init__(ops)
        self._comm = comm

    def __call__(self, logits: Tensor, inputs: SampleInputs) -> SampleOutput:
        drawn = super().__call__(logits, inputs)
        self._comm.tell(drawn.tokens.contiguous())
        return drawn


class ToldSampler(Sampler):
    def __init__(self, ops: SampleOps, comm: Comm) -> None:
        super().__init__(ops)
        self._comm = comm

    def __call__(self, logits: Tensor, inputs: SampleInputs) -> SampleOutput:
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        self._comm.tell(tokens)
        assert inputs.rows is not None
        at = inputs.rows.ids.long(), inputs.positions.long()
        inputs.rows.tokens.index_put_(at, tokens.int())
        return SampleOutput(tokens, None)
