"""AtHome: attention of a rank's own rows by the rank alone, with whole weights and its own pages.

It takes the rows of this rank out of those of all, and brings what every rank made of its own
together again: one gather a layer. A rank without a row in the step takes part in that alone.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from quire.dist.homes import Homes
from quire.forward import LayerContext
from quire.nn.attention import Attention, NormedStore, Ropes
from quire.nn.linear import Linear
from quire.nn.mla import MlaAttention
from quire.nn.norm import LayerNorm, RMSNorm
from quire.nn.ops import Ops
from quire.nn.parameter import Parameter


class AtHome:
    """Stands where `Attention` or `MlaAttention` does."""

    def __init__(self, inner: Attention | MlaAttention, width: int) -> None:
        """`width`: of the stream."""
        self.inner, self.width = inner, width

    def linears(self) -> dict[str, Linear]:
        return self.inner.linears()

    def norms(self) -> dict[str, RMSNorm]:
        return self.inner.norms()

    def parameters(self) -> dict[str, Parameter]:
        return self.inner.parameters()

    def finish(self, ops: Ops, ropes: Ropes) -> None:
        self.inner.finish(ops, ropes)

    def after(self, norm: RMSNorm | LayerNorm) -> NormedStore | None:
        """Rows are normed before some are taken."""
        return None

    def store(self, x: Tensor, at: LayerContext) -> Tensor:
        """Keys and values of our rows of [tokens, hidden] into the cache; returns their queries."""
        if at.homes is None:  # a probe while the model is loaded: nobody else is asked
            return self.inner.store(x, at)
        own = at.homes.take(x)
        return self.inner.store(own, _own(at, at.homes)) if at.homes.has_own else own

    def attend(self, q: Tensor, at: LayerContext) -> Tensor:
        """Our queries -> [queries of all, hidden]."""
        if at.homes is None:
            return self.inner.attend(q, at)
        if at.homes.has_own:
            return at.homes.gather(self.inner.attend(q, _own(at, at.homes)))
        return at.homes.gather(q.new_empty(0, self.width))


def _own(at: LayerContext, homes: Homes) -> LayerContext:
    """With the adapters of our rows."""
    return at if at.adapted is None else replace(at, adapted=at.adapted.of_own(homes))
