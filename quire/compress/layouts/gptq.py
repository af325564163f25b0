"""GPTQ's own layout, first version: `qweight`, `qzeros` (less one), `scales`, `g_idx`.

What each holds is told in `load/gptq.py`, its reader.
"""

from __future__ import annotations

from torch import Tensor

from quire.compress.grid import Codes, Grid
from quire.compress.layouts.words import to_words
from quire.errors import NotSupported


def check(module: str, shape: tuple[int, int], bits: int) -> None:
    """Raises NotSupported where codes would not fill whole words."""
    num_out, num_in = shape
    if num_out * bits % 32 or num_in * bits % 32:
        raise NotSupported(
            f"{module} is {num_out} by {num_in}: codes of {bits} bits do not fill whole words of"
            f" the gptq layout; name it in --keep, or take --bits 8"
        )


def pack(codes: Codes, grid: Grid) -> dict[str, Tensor]:
    zeros = (codes.steps.zeros.int() - 1) & grid.most  # a zero of 0 wraps around
    return {
        "qweight": to_words(codes.codes, grid.bits).t().contiguous(),
        "qzeros": to_words(zeros.byte().t().contiguous(), grid.bits),
        "scales": codes.steps.scales.t().to(grid.dtype).contiguous(),
        "g_idx": codes.groups.int(),
    }


def said(grid: Grid, desc_act: bool, kept: list[str], quantises_head: bool) -> dict[str, object]:
    """`quantization_config`; `kept` are patterns of modules in blocks that stay plain."""
    found: dict[str, object] = {
        "quant_method": "gptq",
        "bits": grid.bits,
        "group_size": -1 if grid.group is None else grid.group,
        "desc_act": desc_act,
        "sym": not grid.has_zeros,
        "checkpoint_format": "gptq",
        "lm_head": quantises_head,
        "true_sequential": False,
    }
    if kept:
        found["dynamic"] = {f"-:{name}": {} for name in kept}
    return found
