"""Balance: keys made even before they become codes, without a change to any result.

A bias of the key projection, and dimensions that are larger than others, would set the scale of a
whole row: Qwen's keys have biases of 100 where what tells tokens apart is 1. What all keys have in
common shifts all logits of a query alike, which a softmax does not see, so it is taken away. Then
every dimension is divided by a power of two near its size, and the query's is multiplied by it.
Where rows are rotated before they become codes, errors are spread over all dimensions alike. Then
the root of the sizes of keys and queries is the better divisor: the error of a logit grows with
the energy of keys times that of queries, and the product is least where both have the same shape.
Sizes are estimated once, from what random inputs of a layer's norm become; nothing is calibrated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.attn.backend import AttnSpec, HeadTransform, LayerCache
from quire.attn.heads import Rotation, split_heads

NUM_PROBES = 256
POSITIONS = 4096  # over which a rotated bias is averaged


@dataclass(frozen=True, slots=True)
class Balance:
    offsets: Tensor  # [kv_heads, dim] f32, taken from every key after rotation
    factors: Tensor  # [kv_heads, dim] f32, powers of two: keys are divided, queries multiplied

    def of(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, heads, dim] queries and [tokens, kv_heads, dim] keys, in fp32."""
        each = q.shape[1] // k.shape[1]
        own = self.factors.repeat_interleave(each, 0)
        return q.float() * own, (k.float() - self.offsets) / self.factors


class KeyProbe:
    """Stands in for a backend: what a layer hands over is kept instead of stored."""

    queries: Tensor  # [tokens, heads, dim], yet to be turned by their positions
    keys: Tensor  # [tokens, kv_heads, dim], likewise

    def prepare(
        self, qkv: Tensor, heads: HeadTransform, cache: LayerCache, plan: object, spec: AttnSpec
    ) -> Tensor:
        self.queries, self.keys, _ = split_heads(qkv, heads, Rotation(None, None), spec)
        return self.queries


def balance_of(
    keys: Tensor, heads: HeadTransform, may_shift: bool, queries: Tensor | None = None
) -> Balance:
    """From keys before rotation; `may_shift`: the softmax sees nothing but the keys' logits.

    `queries`, where errors of codes are the same in all dimensions."""
    keys = keys.double()
    bias, spread = keys.mean(0), keys.var(0)  # [kv_heads, dim]
    offsets, power = bias.clone(), spread.clone()
    if heads.cos is not None and heads.sin is not None and len(heads.cos) > 1:
        half = heads.cos.shape[1]
        cos, sin = heads.cos[1].double(), heads.sin[1].double()
        steps = torch.arange(POSITIONS, dtype=torch.float64, device=keys.device)
        angles = steps[:, None] * torch.atan2(sin, cos)
        size = torch.hypot(cos, sin)
        turns = torch.polar(size.expand_as(angles), angles)  # [positions, half]
        pairs = torch.complex(bias[:, :half], bias[:, half : 2 * half])
        turned = turns[:, None] * pairs  # [positions, kv_heads, half]
        own = size.square() * (spread[:, :half] + spread[:, half : 2 * half]) / 2
        for i, part in enumerate((turned.real, turned.imag)):
            at = slice(i * half, (i + 1) * half)
            offsets[:, at] = part.mean(0)
            power[:, at] = own + (part.var(0) if may_shift else part.square().mean(0))
    elif not may_shift:
        power += bias.square()
    if not may_shift:
        offsets.zero_()
    exponents = _log2_of_root(power)
    if queries is not None:
        exponents = (exponents - _log2_of_root(_query_power(queries, heads, keys.shape[1]))) / 2
    return Balance(offsets.float(), torch.exp2(exponents.round()).float())


def _log2_of_root(power: Tensor) -> Tensor:
    return power.sqrt().clamp(2.0**-60, 2.0**60).log2()


def _query_power(queries: Tensor, heads: HeadTransform, num_kv_heads: int) -> Tensor:
    """[kv_heads, dim]: the mean square of the queries that read a head, turned by any position."""
    tokens, num_heads, dim = queries.shape
    grouped = queries.double().view(tokens, num_kv_heads, num_heads // num_kv_heads, dim)
    power = grouped.square().mean((0, 2))
    if heads.cos is not None and heads.sin is not None and len(heads.cos) > 1:
        half = heads.cos.shape[1]
        pairs = (power[:, :half] + power[:, half : 2 * half]) / 2
        size = torch.hypot(heads.cos[1].double(), heads.sin[1].double())
        power[:, : 2 * half] = (size.square() * pairs).repeat(1, 2)
    return power


def balanced(
    heads: HeadTransform, probe: KeyProbe, may_shift: bool, rotates: bool
) -> HeadTransform:
    queries = probe.queries if rotates else None
    return replace(heads, balance=balance_of(probe.keys, heads, may_shift, queries))
