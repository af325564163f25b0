"""AWQ's `gemm` layout: codes of four bits packed along the outputs, in an order of their own.

What each tensor holds is told in `load/awq.py`, its reader.
"""

from __future__ import annotations

from torch import Tensor

from quire.compress.grid import Codes, Grid
from quire.compress.layouts.words import to_words
from quire.errors import NotSupported

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs of a word, least significant first


def check(module: str, shape: tuple[int, int]) -> None:
    """Raises NotSupported where codes would not fill whole words."""
    if shape[0] % len(ORDER):
        raise NotSupported(
            f"{module} has {shape[0]} outputs, the awq layout wants a multiple of {len(ORDER)};"
            " name it in --keep"
        )


def pack(codes: Codes, grid: Grid) -> dict[str, Tensor]:
    return {
        "qweight": _words(codes.codes.t()),
        "qzeros": _words(codes.steps.zeros.byte().t()),
        "scales": codes.steps.scales.t().to(grid.dtype).contiguous(),
    }


def _words(codes: Tensor) -> Tensor:
    """uint8 [rows, out] -> int32 [rows, out / 8]."""
    some = codes.contiguous().unflatten(1, (-1, len(ORDER)))
    return to_words(some[..., ORDER].flatten(1), 4)


def said(grid: Grid, kept: list[str]) -> dict[str, object]:
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": grid.bits,
        "group_size": -1 if grid.group is None else grid.group,
        "zero_point": grid.has_zeros,
        "modules_to_not_convert": kept or None,
    }
