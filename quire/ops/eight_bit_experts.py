"""EightBitExperts: the CUDA kernel of experts of eight bits by eight bits (W8A8).

Tokens are rounded once for all the experts they visit, and what comes out of the gate once more.
A token's bits are those of dense products with its experts' weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.eight_bit_matmul import EightBitTile, eight_bit_matmul
from quire.kernels.eight_bit_weight import EightBitWeight
from quire.kernels.grouped_eight_bit import TILES, multiply_eight_bit
from quire.kernels.matmul import interleave
from quire.kernels.rehearsal import rehearsal
from quire.kernels.round_inputs import Rounding, round_inputs
from quire.kernels.route import combine, sort_pairs
from quire.nn.ops import GateForm, Visits
from quire.ops.eight_bit_of import EightBitForm, eight_bit_weight
from quire.quant.weight import Weight

_CHECKED_OUTPUTS, _CHECKED_EXPERTS, _CHECKED_TOKENS = 96, 2, 150
_ONE_TILE = EightBitTile(16, 64, 3, 4, 64)


@dataclass(frozen=True, slots=True)
class ExpertBytes:
    """One product of all experts."""

    weight: EightBitWeight  # [experts * out, in]
    bias: Tensor | None  # [experts, out], in the order of the weight's rows
    rounding: Rounding  # of its inputs


class EightBitExperts:
    """Two grouped products over tokens sorted by expert, without a loop."""

    def __init__(
        self,
        up: ExpertBytes,
        down: ExpertBytes,
        num_experts: int,
        form: GateForm,
        gate: Callable[[Tensor], Tensor],
    ) -> None:
        """`gate`: where it does not come with the first product."""
        self.up, self.down, self.num_experts, self.gate = up, down, num_experts, gate
        self.fused = form.activation if up.weight.paired else None

    def __call__(self, x: Tensor, visits: Visits, loads: Tensor | None) -> Tensor:
        pairs = sort_pairs(visits.experts, self.num_experts, loads)
        rounded = round_inputs(x, self.up.rounding)
        # [pairs, ffn], sorted by expert; without the gate twice as wide
        inner = multiply_eight_bit(
            *(rounded, self.up.weight, pairs, self.up.bias, x.dtype),
            is_gather=True,
            gate=self.fused,
        )
        inner = inner if self.fused else self.gate(inner)
        rounded = round_inputs(inner, self.down.rounding)
        # [pairs, hidden], token by token again
        out = multiply_eight_bit(
            *(rounded, self.down.weight, pairs, self.down.bias, x.dtype), is_gather=False
        )
        return combine(out, visits.weights)


def can_fuse(form: GateForm) -> bool:
    return form.limit is None


def expert_bytes(
    weight: Weight, form: EightBitForm, bias: Tensor | None, num_experts: int, paired: bool
) -> ExpertBytes:
    """`paired`: rows of gate and up take turns, as the gate in the product wants them."""
    if paired and bias is not None:
        bias = interleave(bias.t()).t().contiguous()
    made = eight_bit_weight(weight, form, paired, num_experts)
    return ExpertBytes(made, bias, form.rounding)


def grouped_difference(weight: Weight, form: EightBitForm, dtype: torch.dtype) -> str | None:
    """What is wrong with grouped products on this device: bits that are not those of dense ones,
    which `eight_bit_linear.difference` has judged."""
    count = min(_CHECKED_EXPERTS * _CHECKED_OUTPUTS, weight.shape[0] // _CHECKED_EXPERTS * 2)
    some = eight_bit_weight(weight.pick(slice(0, count)), form)
    device = some.codes.device
    random = torch.Generator(device).manual_seed(0)
    x = torch.randn(_CHECKED_TOKENS, some.shape[1], generator=random, device=device).to(dtype)
    experts = (torch.arange(_CHECKED_TOKENS, device=device) % 3 == 0).int()[:, None]
    rounded, pairs = round_inputs(x, form.rounding), sort_pairs(experts, _CHECKED_EXPERTS)
    dense = eight_bit_matmul(rounded, some, None, dtype, _ONE_TILE)
    halves = dense.view(_CHECKED_TOKENS, _CHECKED_EXPERTS, -1)
    want = halves[torch.arange(_CHECKED_TOKENS, device=device), experts[:, 0].long()]

    def by(tile: int) -> Tensor:
        return multiply_eight_bit(
            *(rounded, some, pairs, None, dtype), is_gather=True, tile=TILES[tile]
        )

    if x.is_cuda:
        with rehearsal():
            for tile in range(len(TILES)):
                by(tile)
    order = pairs.pairs.long()
    for tile in range(len(TILES)):
        if not torch.equal(by(tile), want[order]):
            return f"products of experts by tiles of {TILES[tile].block_m} rows differ"
    return None
