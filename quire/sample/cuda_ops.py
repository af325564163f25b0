"""CudaSampling: draws, masks and ranks of a GPU. No call waits for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

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
        return draw(logits, _args(inputs))

    def ranked(self, logits: Tensor, inputs: SampleInputs, num: int) -> Tensor:
        """As in `SampleOps`. Filters are those of what is left: a second token that the first one
        would have kept out is as good a guess as none."""
        args = _args(inputs.by_sample())
        made = [draw(logits, args)]
        for _ in range(num - 1):
            logits.scatter_(1, made[-1][:, None], float("-inf"))
            made.append(draw(logits, args))
        return torch.stack(made, 1)

    def ban(self, logits: Tensor, mask: TokenMask) -> None:
        ban_unset(logits, mask.rows, mask.bits)

    def best(self, logprobs: Tensor, chosen: Tensor, num: int) -> Best:
        return Best((logprobs > chosen).sum(dim=1) + 1, top_by_keys(logprobs, num))


def _args(inputs: SampleInputs) -> DrawArgs:
    rows = inputs.rows
    return DrawArgs(
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
