"""Bytes that kernels keep of a weight, beside the arithmetic of its format, for every format.

A CPU keeps panels, a GPU slabs; both are made here without one. Formats that a device keeps wider
than 3 % above their files are named in WIDER with how much; docs/quantisation.md says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from quire.load.gguf_types import GGML_TYPES
from quire.load.grouped import Grouped, consecutive
from quire.load.ternary import ternary_weight
from quire.native.panels import can_be_panels, pack
from quire.quant.codebook import Codebook
from quire.quant.coded import Coded
from quire.quant.gguf_codes import can_code, coded
from quire.quant.load_forms import E2M1_TABLE, NF4, load_form
from quire.quant.scaled import Scaled
from quire.quant.weight import Weight

slabs = pytest.importorskip("quire.ops.slabs_of")  # needs triton

NUM_OUT, NUM_IN = 512, 1024
E4M3 = torch.float8_e4m3fn


def _gguf(name: str) -> tuple[Weight, float]:
    kind = next(kind for kind in GGML_TYPES.values() if kind.name == name)
    size = (NUM_OUT, NUM_IN // kind.block_size * kind.block_bytes)
    blocks = torch.randint(0, 60, size, dtype=torch.uint8)  # fp16 of such bytes are finite
    return coded(blocks, kind), 8 * kind.block_bytes / kind.block_size


def _loaded(name: str, bits: float) -> tuple[Weight, float]:
    made = load_form(name).of(torch.randn(NUM_OUT, NUM_IN))
    assert made is not None
    return made, bits


def _gptq(bits: int, group: int, has_zeros: bool) -> tuple[Weight, float]:
    codes = torch.randint(0, 2**bits, (NUM_OUT, NUM_IN), dtype=torch.uint8)
    scales = (torch.rand(NUM_OUT, NUM_IN // group) + 0.1).half()
    zeros = torch.randint(0, 2**bits, scales.shape, dtype=torch.uint8)
    groups = consecutive(NUM_IN, group, codes.device)
    made = Grouped(codes, bits, scales, zeros if has_zeros else 2 ** (bits - 1), groups).weight()
    return made, bits + (16 + bits * has_zeros) / group


def _fp8_blocks() -> tuple[Weight, float]:
    codes = torch.randn(NUM_OUT, NUM_IN).to(E4M3)
    scales = torch.rand(NUM_OUT // 128, NUM_IN // 128)
    return Scaled(codes, scales, (128, 128)), 8 + 32 / 128**2


def _nf4_of_two_levels() -> tuple[Weight, float]:
    """As bitsandbytes reads it: scales are bytes in the file, 256 of which share one of fp32."""
    codes = torch.randint(0, 16, (NUM_OUT, NUM_IN), dtype=torch.uint8)
    return Codebook(codes, NF4, torch.rand(NUM_OUT, NUM_IN // 64)), 4 + 8 / 64 + 32 / 64 / 256


def _nvfp4() -> tuple[Weight, float]:
    codes = torch.randint(0, 16, (NUM_OUT, NUM_IN), dtype=torch.uint8)
    scales = torch.randint(0x30, 0x7F, (NUM_OUT, NUM_IN // 16), dtype=torch.uint8)
    made = Coded(codes, 4, 16, scales, super_scales=torch.rand(NUM_OUT, 1) + 1, eighths="over")
    return replace(made, table=E2M1_TABLE), 4 + 8 / 16


def _scaled_by(dtype: torch.dtype, group: int) -> tuple[Weight, float]:
    """Int4 with scales as files have them: bf16 comes as fp32."""
    made, bits = _gptq(4, group, False)
    assert isinstance(made, Coded)
    return replace(made, scales=made.scales.to(dtype).float()), bits


def _fp8_tensor() -> tuple[Weight, float]:
    return Scaled(torch.randn(NUM_OUT, NUM_IN).to(E4M3), torch.rand(1, 1), (NUM_OUT, NUM_IN)), 8


def _mxfp8() -> tuple[Weight, float]:
    """Exponents of two, which are bytes in the file."""
    powers = 2.0 ** torch.randint(-8, 8, (NUM_OUT, NUM_IN // 32))
    return Scaled(torch.randn(NUM_OUT, NUM_IN).to(E4M3), powers, (1, 32)), 8 + 8 / 32


def _fp4() -> tuple[Weight, float]:
    """bitsandbytes' other 16 values, without nested scales."""
    codes = torch.randint(0, 16, (NUM_OUT, NUM_IN), dtype=torch.uint8)
    values = tuple(value / 12 for value in E2M1_TABLE)
    return Codebook(codes, values, torch.rand(NUM_OUT, NUM_IN // 64)), 4 + 32 / 64


def _bitnet() -> tuple[Weight, float]:
    """One number a matrix in the file, and one a row here."""
    ternary = torch.randint(-1, 2, (NUM_OUT, NUM_IN)).float()
    return ternary_weight(ternary, torch.tensor([0.5])), 2


def _codebook(bits: int) -> tuple[Weight, float]:
    """Of values for every four rows, one scale a row."""
    codes = torch.randint(0, 2**bits, (NUM_OUT, NUM_IN), dtype=torch.uint8)
    tables = torch.randint(-127, 128, (NUM_OUT // 4, 16), dtype=torch.int8).repeat_interleave(4, 0)
    scales = (torch.rand(NUM_OUT, 1) + 0.1).half()
    made = Coded(codes, 4, 32, scales, tables=tables, share=NUM_IN // 32)
    return made, bits + (16 + 8 * 2**bits / 4) / NUM_IN


LOADED = {
    "fp8": 8 + 32 / NUM_IN,
    "int8": 8 + 16 / NUM_IN,
    "nf4": 4 + 32 / 64,
    "mxfp4": 4 + 8 / 32,
    "rtn-int4-g128": 4 + 16 / 128,
    "rtn-int4-g128-asym": 4 + 20 / 128,
    "rtn-int4-g32": 4 + 16 / 32,
    "rtn-int4-g32-asym": 4 + 20 / 32,
    "rtn-int8-g32": 8 + 16 / 32,
    "rtn-int8-g32-asym": 8 + 24 / 32,
    "sparse24": 16 / 2 + 3 / 4,  # which two of four are kept: one of six
}
FORMATS: dict[str, Callable[[], tuple[Weight, float]]] = {
    **{kind.name: partial(_gguf, kind.name) for kind in GGML_TYPES.values() if can_code(kind)},
    **{name: partial(_loaded, name, bits) for name, bits in LOADED.items()},
    **{
        f"int {bits} bits g{group}{', zeros' * has_zeros}": partial(_gptq, bits, group, has_zeros)
        for bits in (1, 2, 3, 4, 5, 6, 7, 8)
        for group in (32, 128)
        for has_zeros in (False, True)
    },
    "int4 g32, bf16 scales": partial(_scaled_by, torch.bfloat16, 32),
    "int4 g128, bf16 scales": partial(_scaled_by, torch.bfloat16, 128),
    "int4 g32, fp16 scales as fp32": partial(_scaled_by, torch.float16, 32),
    "fp8 of one scale": _fp8_tensor,
    "fp8 in blocks": _fp8_blocks,
    "mxfp8": _mxfp8,
    "fp4": _fp4,
    "bitnet": _bitnet,
    **{f"codebook {bits} bits": partial(_codebook, bits) for bits in (2, 3, 4)},
    "nf4 of two levels": _nf4_of_two_levels,
    "nvfp4": _nvfp4,
}
# By how much more than the file, on a CPU and on a GPU; None: within 3 %.
WIDER: dict[str, tuple[float | None, float | None]] = {
    "Q3_K": (0.327, None),
    "Q1_0": (0.889, 0.889),
    "TQ1_0": (0.222, 0.222),
    **{f"int 1 bits g{group}": (more, more) for group, more in ((32, 0.667), (128, 0.889))},
    **{f"int 1 bits g{group}, zeros": (more, more) for group, more in ((32, 0.796), (128, 0.931))},
    "int 2 bits g32, zeros": (0.073, 0.073),
    "int 3 bits g32": (0.286, None),
    "int 3 bits g32, zeros": (0.322, 0.043),
    "int 3 bits g128": (0.320, None),
    "int 3 bits g128, zeros": (0.330, None),
    **{f"int 7 bits g32{zeros}": (0.133, 0.133) for zeros in ("", ", zeros")},
    **{f"int 7 bits g128{zeros}": (0.140, 0.140) for zeros in ("", ", zeros")},
    "codebook 2 bits": (1.0, 1.054),
    "codebook 3 bits": (0.335, 0.371),
    "mxfp8": (0.091, 0.091),
    "nf4 of two levels": (0.091, 0.091),
}


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_kept_is_what_the_format_says(name: str) -> None:
    """Red when a device keeps a scale or a code wider than it is, or one that was wide no longer
    is: then the table and the docs are to be shorter."""
    torch.manual_seed(0)
    weight, bits = FORMATS[name]()
    in_file = NUM_OUT * NUM_IN * bits / 8
    assert can_be_panels(weight)
    plain, streamed = slabs.slabs_of(weight), slabs.slabs_of(weight, False, torch.bfloat16)
    assert plain is not None and streamed is not None
    on_cpu, on_gpu = WIDER.get(name, (None, None))
    kept = ((pack(weight).num_bytes, on_cpu), (plain.num_bytes, on_gpu))
    for num_bytes, wider in (*kept, (streamed.num_bytes, on_gpu)):
        above = num_bytes / in_file - 1
        if wider is None:
            assert -1e-3 <= above <= 0.03, above
        else:
            assert above == pytest.approx(wider, abs=2e-3)
