"""Runners of a model that lies on several stages: a step goes from one to the next, and round.

The first stage embeds, passes its stream on, and receives the states that the last one ends with;
it draws from them as if it had computed them itself. A later stage receives, computes its layers
and passes on; it never sees a token. All execute the same plans, so each knows how many rows come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.forward import stream_of
from quire.runner.adapted import adapted_of
from quire.runner.gather import StepShape
from quire.runner.pending import PendingStep
from quire.runner.rank_runner import FirstRunner, OtherRunner
from quire.runner.runner import ModelRunner
from quire.runner.states import Forwarded
from quire.step import StepPlan

Sent = dict[str, Tensor]


class FirstStageRunner(FirstRunner):
    """Of the rank that schedules."""

    def _forward(self, plan: StepPlan, shape: StepShape, sent: Sent) -> Callable[[], Forwarded]:
        return begin_round(self, plan, shape, sent)


class BesideFirstRunner(OtherRunner):
    """Of the other ranks that share the first stage's layers."""

    def _forward(self, plan: StepPlan, shape: StepShape, sent: Sent) -> Callable[[], Forwarded]:
        return begin_round(self, plan, shape, sent)


class LaterStageRunner(ModelRunner):
    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingStep:
        shape, sent = self._stage(plan)
        if shape is not None:
            model, link = self.model, self.model.stage.link
            came = _rows(self, shape.num_tokens, model.stream_parts)
            link.receive(came)
            parts = [part.contiguous() for part in came.split(model.spec.hidden_size, 1)]
            link.send(_beside(_own_layers(self, plan, shape, sent, parts)))
        return PendingStep(())


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
    adapted = adapted_of(runner.adapters, runner.rows, shape)
    if runner.tapes is not None:
        return runner.tapes.run(batches, sent, runner.has_tail(plan, shape), adapted, came)
    ctx = replace(
        runner.planned(batches), adapted=adapted, incoming=stream_of(came) if came else None
    )
    if model.stage.is_last:
        return [model.forward(ctx, runner.tail(plan, shape, sent, ctx.batch))]
    return [part for part in model.pass_on(ctx) if part is not None]


def _rows(runner: ModelRunner, count: int, width: int = 1) -> Tensor:
    """Room for so many tokens, `width` hidden states each."""
    model = runner.model
    shape = (count, width * model.spec.hidden_size)
    return torch.empty(shape, dtype=model.dtype, device=model.device)


def _beside(parts: Sequence[Tensor]) -> Tensor:
    """[tokens, hidden] each -> [tokens, parts * hidden], which nobody writes to again."""
    return torch.cat(list(parts), 1)
