"""An early exit, distilled: the target's first layers stay as they are, what follows them learns.

The stream after layer L is far from what the last norm and the head expect. An adapter in their
place (a norm, a gated feed-forward block, a norm) brings it there; the head is the target's. It
begins as the plain cut: the feed-forward block adds nothing, the last norm is the target's. The
teacher's states hold the stream, so the first layers are read once and never trained through.
`models/heads/exit_adapter.py` is what learns, here and in the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compress.source import HEAD
from quire.distill.leaves import LeafOps, Leaves
from quire.distill.lessons import Lesson
from quire.distill.losses import (
    Judged,
    bent,
    divergence,
    hidden_distance,
    spread,
    survival,
    taken,
)
from quire.distill.pupil import Written
from quire.distill.recipe import Schedule, Shape
from quire.distill.teacher import Target
from quire.errors import BadRequest, NotSupported
from quire.models.heads.exit_adapter import ARCHITECTURE, NAMES, ExitAdapter
from quire.models.spec import ModelSpec

STD = 0.02
EXIT_SHARE = 3  # an exit stands after one of so many layers unless told otherwise


@dataclass(frozen=True, slots=True)
class EarlyExit:
    spec: ModelSpec
    adapter: ExitAdapter
    own: Leaves
    head: Tensor  # [vocab, hidden], the target's
    taps: tuple[int, ...]
    hidden_loss: float

    def leaves(self) -> Mapping[str, Tensor]:
        return self.own.tensors

    def judge(self, lesson: Lesson) -> Judged:
        states, at, spec = lesson.states, lesson.rows, self.spec
        own, _ = self.adapter(taken(states.taps, at)[:, 0], None)  # [rows, hidden]
        wanted = taken(states.final, at)
        logits = bent(F.linear(own, self.head), spec)
        loss = divergence(logits, lesson.logits(wanted))
        if self.hidden_loss:
            loss = loss + self.hidden_loss * hidden_distance(own, wanted)
        agrees = spread(logits.argmax(-1) == taken(states.best, at), at, lesson.counts)
        return Judged(loss, survival(agrees, lesson.counts), len(wanted))

    def written(self) -> Written:
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "exit_layer": self.taps[0],
            "hidden_size": self.spec.hidden_size,
            "intermediate_size": self.own.tensors["down.weight"].shape[1],
            "torch_dtype": "bfloat16",
        }
        return Written(config, self.own.stored(torch.bfloat16))


def make(target: Target, shape: Shape, schedule: Schedule, answers: Sequence[Any]) -> EarlyExit:
    """Raises BadRequest or NotSupported for an exit that the target cannot have."""
    spec = target.source.spec
    layer = shape.layers or max(1, spec.num_layers // EXIT_SHARE)
    if layer >= spec.num_layers:
        raise BadRequest(
            f"got --layers {layer}, but the target has {spec.num_layers}; an exit stands before"
            f" the last: use {spec.num_layers - 1} or less"
        )
    if spec.norm != "rms":
        raise NotSupported(
            f"{spec.architecture} norms by layer norm, exits are made for RMS norms;"
            " take --kind draft_model"
        )
    hidden, ffn = spec.hidden_size, shape.ffn or spec.ffn_size
    generator = torch.Generator().manual_seed(schedule.seed)

    def fresh(*size: int) -> Tensor:
        return torch.empty(size).normal_(0.0, STD, generator=generator)

    tensors = {
        "input_norm.weight": torch.ones(hidden),
        "mlp.gate_proj.weight": fresh(ffn, hidden),
        "mlp.up_proj.weight": fresh(ffn, hidden),
        "mlp.down_proj.weight": torch.zeros(hidden, ffn),
        "norm.weight": target.tensor("norm.weight") + spec.norm_offset,
    }
    adapter = ExitAdapter(spec, ffn, torch.float32, target.device)
    leaves = Leaves.fill(adapter.parameters(), NAMES, tensors)
    adapter.finish(LeafOps())
    head = target.tensor(HEAD)
    return EarlyExit(spec, adapter, leaves, head, (layer,), schedule.hidden_loss)
