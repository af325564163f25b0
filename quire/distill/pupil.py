"""Pupil: the seam to whatever is trained; one file in `pupils/` and one line in `KINDS` each.

A pupil has leaves that learn, judges itself against the teacher on a lesson, and says what files it
is written as. The loop knows nothing else of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from quire.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from quire.distill.lessons import Lesson
    from quire.distill.losses import Judged

KINDS = Registry(
    "kind of pupil",
    {
        "draft_model": "quire.distill.pupils.draft_model:make",
        "student": "quire.distill.pupils.student:make",
        "early_exit": "quire.distill.pupils.early_exit:make",
        "medusa": "quire.distill.pupils.medusa:make",
        "eagle3": "quire.distill.pupils.eagle3:make",
    },
)


@dataclass(frozen=True, slots=True)
class Written:
    """A pupil as files; `config` is written last, as config.json."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    files: Mapping[str, bytes] = field(default_factory=dict)


class Pupil(Protocol):
    """Made by `make(target, shape, schedule, answers)`."""

    taps: tuple[int, ...]  # blocks of the target whose inputs it reads

    def leaves(self) -> Mapping[str, Tensor]:
        """What learns; the names stay the same for the same recipe."""
        ...

    def judge(self, lesson: Lesson) -> Judged:
        """With a graph from the loss to the leaves. Changes nothing."""
        ...

    def written(self) -> Written:
        """As it is now."""
        ...
