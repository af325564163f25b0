"""Recipe: all that a run was asked for. Two runs with the same recipe make the same bits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from quire.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Corpus:
    """What the target writes for the pupil to learn from."""

    answers: int = 512
    tokens: int = 192  # of an answer, at most
    temperatures: tuple[float, ...] = (0.0, 1.0)  # in turns
    prompts: str | None = None  # a file; None: the built-in ones
    seed: int = 0
    free_share: float = 0.0  # of answers that begin with a token drawn from all, not a prompt

    def __post_init__(self) -> None:
        if not 0 <= self.free_share <= 1:
            raise BadRequest(f"got --free-share {self.free_share}, want a share from 0 to 1")
        if self.answers < 2:
            raise BadRequest(
                f"got --answers {self.answers}, want at least 2: one to learn from, one to judge by"
            )
        if not self.temperatures or not all(0 <= t <= 2 for t in self.temperatures):
            raise BadRequest(
                f"got --temperatures {self.temperatures}, want numbers from 0 to 2 between commas"
            )


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the pupil learns."""

    steps: int = 200
    batch: int = 4  # answers read at once
    accumulate: int = 1  # such batches in a step
    learning_rate: float = 3e-4
    warmup: int = 20  # steps
    weight_decay: float = 0.0
    clip: float = 1.0  # most of the gradient's norm
    hidden_loss: float = 0.0  # weight of the distance between hidden states, where a pupil has it
    own_share: float = 0.0  # of answers that are the pupil's own (GKD), where it can be run
    seed: int = 0
    save_every: int = 50  # steps

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < 1:
            raise BadRequest(f"got --learning-rate {self.learning_rate}, want one from 0 to 1")
        if not 0 <= self.own_share <= 1:
            raise BadRequest(f"got --own-share {self.own_share}, want a share from 0 to 1")
        if self.hidden_loss < 0:
            raise BadRequest(f"got --hidden-loss {self.hidden_loss}, want a weight of 0 or more")


@dataclass(frozen=True, slots=True)
class Shape:
    """What the pupil is; each kind reads what concerns it, None: its own default."""

    kind: str
    start: str | None = None  # a checkpoint to begin with
    layers: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    vocab: int | None = None  # tokens that a head knows, the commonest
    depth: int | None = None  # tokens ahead


@dataclass(frozen=True, slots=True)
class Recipe:
    target: str
    shape: Shape
    corpus: Corpus
    schedule: Schedule

    def asked(self) -> dict[str, Any]:
        return asdict(self)
