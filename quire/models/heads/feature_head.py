"""FeatureHead: a layer that guesses on from the target's hidden states and its own.

At position p it reads a *feature* of that position and the token behind it, p + 1, and gives logits
of the token at p + 2. Features of positions that the target has computed are made of its hidden
states; further on, each guess goes on with what the layer gave before. The layer attends to
positions before it through pages of its own, so its keys and values must be stored for all of
them: `store` does that, and `attend` is for those that something is drawn from.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from quire.forward import LayerContext, StateReads
from quire.models.decoder import Decoder
from quire.models.heads.vocabulary import DraftVocabulary
from quire.nn.ops import Ops
from quire.nn.parameter import Parameter


class Stored(NamedTuple):
    """What `attend` goes on with."""

    queries: Tensor  # [tokens, heads, dim]
    stream: Tensor  # [tokens, hidden]


class Guessed(NamedTuple):
    logits: Tensor  # [rows, outputs of the head]
    features: Tensor  # [rows, hidden] for the position behind


class FeatureHead(Protocol):
    reads: StateReads  # of the target
    vocabulary: DraftVocabulary | None  # that its outputs stand for; None: the target's

    def features(self, states: Tensor) -> Tensor:
        """[tokens, all that `reads` asks for, side by side] -> [tokens, hidden]."""
        ...

    def store(self, ids: Tensor, features: Tensor, at: LayerContext) -> Stored:
        """Keys and values of these positions into the cache; `ids` are the tokens behind them."""
        ...

    def attend(self, stored: Stored, at: LayerContext) -> Guessed:
        """With a plan of some tokens alone, `stored` has these alone."""
        ...

    def parameters(self) -> dict[str, Parameter]:
        """Every tensor the loader must fill, by our name."""
        ...

    def finish(self, ops: Ops, target: Decoder) -> None:
        """Weights are in; `target` lends what the head shares with it."""
        ...
