"""A student: an existing checkpoint that learns to answer as its teacher does.

It may be a model that was made smaller, a smaller member of the family, or the draft model of
`draft_model.py`. What is written is an ordinary checkpoint of its family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.compress.files import SAID_BEFORE, files_of
from quire.compress.source import Source
from quire.distill.decoder import TrainableDecoder, streams
from quire.distill.lessons import Lesson
from quire.distill.losses import (
    Judged,
    divergence_from,
    hidden_distance,
    spread,
    survival,
    taken,
)
from quire.distill.pupil import Written
from quire.distill.recipe import Schedule, Shape
from quire.distill.teacher import Target
from quire.errors import BadRequest, NotSupported


@dataclass(frozen=True, slots=True)
class Student:
    trainable: TrainableDecoder
    config: Mapping[str, Any]
    files: Mapping[str, bytes]
    dtype: torch.dtype  # as it is written
    hidden_loss: float = 0.0
    taps: tuple[int, ...] = ()

    def leaves(self) -> Mapping[str, Tensor]:
        return self.trainable.leaves.tensors

    def judge(self, lesson: Lesson) -> Judged:
        model, at = self.trainable.model, lesson.rows
        own = taken(streams(model, lesson.ids).final, at)  # [rows, hidden]
        wanted = taken(lesson.states.final, at)
        loss, agreed = divergence_from(model.logits(own), lambda rows: lesson.logits(wanted[rows]))
        if self.hidden_loss:
            loss = loss + self.hidden_loss * hidden_distance(own, wanted)
        agrees = spread(agreed, at, lesson.counts)
        return Judged(loss, survival(agrees, lesson.counts), len(wanted))

    def written(self) -> Written:
        return Written(self.config, self.trainable.leaves.stored(self.dtype), self.files)


def make(target: Target, shape: Shape, schedule: Schedule, answers: object) -> Student:
    """Raises BadRequest or NotSupported for a student that cannot learn from this target."""
    if shape.start is None:
        raise BadRequest(
            "--kind student needs a checkpoint to begin with: add --from MODEL, or take --kind"
            " draft_model for a fresh one"
        )
    source = Source.open(shape.start)
    check_vocabulary(shape.start, source, target.source)
    if schedule.hidden_loss and source.spec.hidden_size != target.source.spec.hidden_size:
        raise NotSupported(
            f"got --hidden-loss {schedule.hidden_loss} for hidden states of"
            f" {source.spec.hidden_size} beside the target's {target.source.spec.hidden_size}:"
            " only states of one width can be compared; leave it out"
        )
    tensors = {name: source.read(name) for name in source.places}
    trainable = TrainableDecoder.of(source.spec, source.names, tensors, target.device)
    config = plain_config(source.config, source.dtype)
    return Student(trainable, config, files_of(source), source.dtype, schedule.hidden_loss)


def check_vocabulary(name: str, own: Source, target: Source) -> None:
    """Raises NotSupported unless every id means the same token to both."""
    if own.spec.vocab_size != target.spec.vocab_size:
        raise NotSupported(
            f"got {name!r} with {own.spec.vocab_size} tokens for a target with"
            f" {target.spec.vocab_size}: a pupil learns the target's distribution over one"
            " vocabulary; take a smaller model of the same family"
        )
    if own.tokenizer is None or target.tokenizer is None:
        return
    ours, theirs = own.tokenizer, target.tokenizer
    for id in range(0, own.spec.vocab_size, max(1, own.spec.vocab_size // 256)):
        if ours.decode([id]) != theirs.decode([id]):
            raise NotSupported(
                f"got {name!r}, to which token {id} means {ours.decode([id])!r} and to the target"
                f" {theirs.decode([id])!r}: pupils need the target's own tokenizer"
            )


def plain_config(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json of plain weights in this dtype."""
    made = {key: value for key, value in config.items() if key not in SAID_BEFORE}
    name = str(dtype).removeprefix("torch.")
    made |= {key: name for key in ("torch_dtype", "dtype") if key in made}
    made.setdefault("torch_dtype", name)
    return made
