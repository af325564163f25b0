"""Hidden states of one step, as values: what a forward gives, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from quire.runner.gather import StepShape
from quire.runner.pending import PromptPart
from quire.runner.pooling import PooledPart
from quire.step import StepPlan


class Forwarded(NamedTuple):
    """Good until the next step."""

    hidden: Tensor  # after the last norm: of all tokens or, with a tail, of its own
    streams: tuple[Tensor, ...]  # before the layers that are tapped, [tokens, hidden] each
    has_tail: bool


class Launched(NamedTuple):
    """A step whose forward was begun; nothing is drawn so far."""

    plan: StepPlan
    shape: StepShape
    sent: dict[str, Tensor]
    drafts: Tensor | None  # for each sample the draft in its place, if the runner made any
    # What a graph gives, logits alone where nobody waits for more; or states once awaited.
    made: Tensor | Replayed | Callable[[], Forwarded]


class StepStates(NamedTuple):
    """The same for whoever drafts; good until the next step."""

    streams: tuple[Tensor, ...]
    every: Tensor | None  # after the last norm [tokens, hidden]; None: the step had a tail
    sampled: Tensor  # the same, of the tokens that something is drawn after [samples, hidden]


class Replayed(NamedTuple):
    """What a graph gave of a step with trees; good until the next step."""

    logits: Tensor  # of all samples
    states: StepStates


class StepRead(NamedTuple):
    """What is left when prompts and pools have had theirs."""

    sampled: Tensor  # [samples, hidden]
    prompts: Sequence[PromptPart] = ()
    pooled: Sequence[PooledPart] = ()
    states: StepStates | None = None
