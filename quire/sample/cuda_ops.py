"""CudaSampling: draws, masks and ranks of a GPU. No call waits for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.kernels.sample import DrawArgs, draw
from quire.kernels.token_mask import ban_unset
from quire.sample.logprobs import top_by_keys
from quire.sample.ops import Best

if TYPE_CHECKING:
    from torch import Tensor

    from quire.sample.inputs import SampleInputs, TokenMask


class CudaSampling:
    """`SampleOps`."""

    def draw(self, logits: Tensor, inputs: SampleInputs) -> Tensor:
        rows = inputs.rows
        args = DrawArgs(
            temperature=inputs.temperature,
            seeds=inputs.seeds,
            positions=inputs.positions,
            top_k=inputs.top_k,
            top_p=inputs.top_p,
            min_p=inputs.min_p,
            narrows=inputs.any_top_k or inputs.any_top_p or inputs.any_min_p,
            rows=None if rows is None else rows.ids,
            table=None if rows is None else rows.tokens,
        )
        return draw(logits, args)

    def ban(self, logits: Tensor, mask: TokenMask) -> None:
        ban_unset(logits, mask.rows, mask.bits)

    def best(self, logprobs: Tensor, chosen: Tensor, num: int) -> Best:
        return Best((logprobs > chosen).sum(dim=1) + 1, top_by_keys(logprobs, num))
