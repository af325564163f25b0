"""Runners of a model that lies on several stages: a step goes from one to the next, and round.

The first stage embeds, passes its stream on, and receives the states that the last one ends with;
it draws from them as if it had computed them itself. A later stage receives, computes its layers
and passes on; it never sees a token. All execute the same plans, so each knows how many rows come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.dist.comm import Comm
from quire.forward import stream_of
from quire.runner.adapted import adapted_of, recorded_of
from quire.runner.gather import StepShape
from quire.runner.pending import PendingStep
from quire.runner.rank_runner import FirstRunner, OtherRunner, Others
from quire.runner.runner import ModelRunner
from quire.runner.states import Forwarded, Launched
from quire.runner.tail import tail_of
from quire.step import Pending, StepPlan, StepResult

Sent = dict[str, Tensor]


class Round:
    """A step on its way through the stages."""

    def __init__(self, launched: Launched, settle: Callable[[Round], None]) -> None:
        self.launched, self._settle = launched, settle
        self.drawn: Pending | None = None

    def result(self) -> StepResult:
        if self.drawn is None:
            self._settle(self)
        assert self.drawn is not None
        return self.drawn.result()

    def delays(self, plan: StepPlan) -> bool:
        """Whether the plan must wait for it: it feeds a token that is drawn here, or gives a row
        to another request."""
        works = self.launched.plan.works
        fed = {work.row for work in plan.works}
        new = {admission.row for admission in plan.admissions}
        return any((work.sample and work.row in fed) or work.row in new for work in works)


class FirstStageRunner(FirstRunner):
    """Of the rank that schedules. Steps that do not need each other's tokens are under way at the
    same time; each is drawn when somebody asks for its result or for its tokens."""

    def __init__(self, others: Others, comm: Comm, *parts: Any) -> None:
        super().__init__(others, comm, *parts)
        self._rounds: deque[Round] = deque()  # launched and not drawn

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Pending:
        awaited = [before for before in self._rounds if before.delays(plan)]
        if awaited:
            self._settle(awaited[-1])
        self._announce(plan)
        with self._together():
            launched = self._launch(plan)
            if launched is None:
                return PendingStep(())
            made = Round(admitted(self, launched), self._settle)
        self._rounds.append(made)
        return made

    @torch.inference_mode()
    def _settle(self, last: Round) -> None:
        """Draw for all up to this one."""
        while last.drawn is None:
            self._others.settle()
            oldest = self._rounds.popleft()
            with self._together():
                oldest.drawn = self._checked(self._conclude(oldest.launched))

    def _forward(self, plan: StepPlan, shape: StepShape, sent: Sent) -> Callable[[], Forwarded]:
        return begin_round(self, plan, shape, sent)


class BesideFirstRunner(OtherRunner):
    """Of the other ranks that share the first stage's layers: they draw when the first one does."""

    def __init__(self, comm: Comm, *parts: Any) -> None:
        super().__init__(comm, *parts)
        self._rounds: deque[Launched] = deque()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Pending:
        launched = self._launch(plan)
        if launched is not None:
            self._rounds.append(admitted(self, launched))
        return PendingStep(())

    @torch.inference_mode()
    def settle(self) -> None:
        self._conclude(self._rounds.popleft())

    def _forward(self, plan: StepPlan, shape: StepShape, sent: Sent) -> Callable[[], Forwarded]:
        return begin_round(self, plan, shape, sent)


class LaterStageRunner(ModelRunner):
    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Pending:
        shape, sent = self._prepare(plan)
        if shape is not None:
            model, link = self.model, self.model.stage.link
            came = _rows(self, shape.num_tokens, model.stream_parts)
            link.receive(came)
            parts = [part.contiguous() for part in came.split(model.spec.hidden_size, 1)]
            link.send(_beside(_own_layers(self, plan, shape, sent, parts)))
        return PendingStep(())


def admitted(runner: ModelRunner, launched: Launched) -> Launched:
    """With its newcomers' wishes in their rows now: when it is drawn, rows may be others'. On a GPU
    the next step's upload takes the place of this one's, so what the draw reads is put aside."""
    runner.admit(launched.plan)
    sent = launched.sent
    if runner.model.device.type == "cuda":
        sent = {name: array.clone() for name, array in sent.items()}
    return launched._replace(plan=replace(launched.plan, admissions=()), sent=sent)


def begin_round(
    runner: ModelRunner, plan: StepPlan, shape: StepShape, sent: Sent
) -> Callable[[], Forwarded]:
    """Our layers now; the result waits for those of all others."""
    link, has_tail = runner.model.stage.link, runner.has_tail(plan, shape)
    link.send(_beside(_own_layers(runner, plan, shape, sent)))

    def states() -> Forwarded:
        hidden = _rows(runner, len(shape.sampled) if has_tail else shape.num_tokens)
        link.receive(hidden)
        return Forwarded(hidden, (), has_tail)

    return states


def _own_layers(
    runner: ModelRunner, plan: StepPlan, shape: StepShape, sent: Sent, came: Sequence[Tensor] = ()
) -> Sequence[Tensor]:
    """The stream for the next stage or, on the last one, the states after the norm."""
    model, batches = runner.model, runner.batches(shape, sent)
    if runner.tapes is not None:
        recorded = recorded_of(runner.adapters, runner.rows, shape)
        return runner.tapes.run(batches, sent, runner.has_tail(plan, shape), recorded, came)
    adapted = adapted_of(runner.adapters, runner.rows, shape)
    ctx = replace(
        runner.planned(batches), adapted=adapted, incoming=stream_of(came) if came else None
    )
    if model.stage.is_last:
        tail = tail_of(runner, shape, sent, ctx.batch) if runner.has_tail(plan, shape) else None
        return [model.forward(ctx, tail)]
    return [part for part in model.pass_on(ctx) if part is not None]


def _rows(runner: ModelRunner, count: int, width: int = 1) -> Tensor:
    """Room for so many tokens, `width` hidden states each."""
    model = runner.model
    shape = (count, width * model.spec.hidden_size)
    return torch.empty(shape, dtype=model.dtype, device=model.device)


def _beside(parts: Sequence[Tensor]) -> Tensor:
    """[tokens, hidden] each -> [tokens, parts * hidden], which nobody writes to again."""
    return torch.cat(list(parts), 1)
