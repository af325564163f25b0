"""MXFP4 and NVFP4: weights as four-bit floats (E2M1) with a scale for every 32 or 16 inputs.

MXFP4 scales are powers of two; of the two that suit a block, the one that loses less is taken.
NVFP4 scales are eight-bit floats below one fp32 of all, which is the same for matrices that readers
fuse (q, k and v; gate and up).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compress.block import BlockTensors, Matrix
from quire.compress.layouts import compressed
from quire.compress.passes.recipe import Kept, Pass
from quire.compress.seen import Seen
from quire.errors import NotSupported

LARGEST = 6.0  # of the numbers below
MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between 0, 0.5, 1, 1.5, 2, 3, 4 and 6
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MX_BLOCK, NV_BLOCK = 32, 16
BIAS = 127  # of an exponent as it is stored
MOST_FP8 = torch.finfo(torch.float8_e4m3fn).max


def nearest_codes(x: Tensor) -> Tensor:
    """uint8 codes of E2M1, ties to even, what is too large to the largest."""
    middles = torch.tensor(MIDDLES, device=x.device)
    size = x.abs().contiguous()
    low, high = torch.bucketize(size, middles), torch.bucketize(size, middles, right=True)
    codes = torch.where(low % 2 == 0, low, high)
    return (codes + 8 * (x < 0)).byte()


def values_of(codes: Tensor) -> Tensor:
    table = torch.tensor((*VALUES, *(-value for value in VALUES)), device=codes.device)
    return table[codes.long()]


class _Fp4(Pass):
    block = MX_BLOCK

    def check(self, module: str, shape: tuple[int, int]) -> None:
        if shape[1] % self.block:
            raise NotSupported(
                f"{module} has {shape[1]} inputs, the format wants a multiple of {self.block};"
                " name it in --keep"
            )


class Mxfp4(_Fp4):
    def pack(self, matrix: Matrix, block: BlockTensors, seen: Seen | None) -> dict[str, Tensor]:
        weight = block.tensors[matrix.name]
        split = weight.view(len(weight), -1, MX_BLOCK)
        most = split.abs().amax(-1).clamp(min=2.0**-100)
        low = (most.log2().floor() - 2).clamp(-BIAS + 1, BIAS)  # 4 to 8 in units of it
        best, least = low, torch.full_like(low, float("inf"))
        for exponent in (low, (low + 1).clamp(max=BIAS)):
            unit = torch.exp2(exponent).unsqueeze(-1)
            loss = (values_of(nearest_codes(split / unit)) * unit - split).square().sum(-1)
            best = torch.where(loss < least, exponent, best)
            least = torch.minimum(loss, least)
        codes = nearest_codes(split / torch.exp2(best).unsqueeze(-1)).view(weight.shape)
        return {
            "weight_packed": compressed.pack_nibbles(codes),
            "weight_scale": (best + BIAS).byte(),
        }

    def said(self, kept: Kept) -> dict[str, object]:
        weights = compressed.float_weights(4, "group", MX_BLOCK)
        weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        return compressed.said("mxfp4-pack-quantized", weights, None, list(kept.modules))


class Nvfp4(_Fp4):
    block = NV_BLOCK

    def pack(self, matrix: Matrix, block: BlockTensors, seen: Seen | None) -> dict[str, Tensor]:
        weight = block.tensors[matrix.name]
        fused = [block.tensors[m.name].abs().max() for m in block.at(matrix.site)]
        whole = LARGEST * MOST_FP8 / torch.stack(fused).max().clamp(min=1e-12)
        split = weight.view(len(weight), -1, NV_BLOCK)
        scales = (split.abs().amax(-1) / LARGEST * whole).clamp(max=MOST_FP8)
        scales = scales.to(torch.float8_e4m3fn)
        unit = scales.float() / whole
        safe = torch.where(unit == 0, 1.0, unit).unsqueeze(-1)
        codes = nearest_codes(split / safe).view(weight.shape)
        return {
            "weight_packed": compressed.pack_nibbles(codes),
            "weight_scale": scales,
            "weight_global_scale": whole.reshape(1),
        }

    def said(self, kept: Kept) -> dict[str, object]:
        weights = compressed.float_weights(4, "tensor_group", NV_BLOCK)
        weights |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        return compressed.said("nvfp4-pack-quantized", weights, None, list(kept.modules))
