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
from quire.native.panels import can_be_panels, pack
from quire.quant.codebook import Codebook
from quire.quant.coded import Coded
from quire.quant.gguf_codes import can_code, coded
from quire.quant.load_forms import E2M1_TABLE, NF4, load_form
from quire.quant.scaled import Scaled
from quire.quant.weight import Weight
from tests.load.held import plain

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


def _codebook(bits: int) -> tuple[Weight, float]:
    """As it is read: every four rows have values of their own."""
    size, groups = 1 << bits, NUM_IN // 128
    said = {"quant_method": "codebook", "bits": bits}
    stored = {
        "w.weight_codes": torch.randint(0, 256, (NUM_OUT, NUM_IN * bits // 8), dtype=torch.uint8),
        "w.weight_values": torch.randint(-127, 128, (NUM_OUT // 4, size), dtype=torch.int8),
        "w.weight_scale": (torch.rand(NUM_OUT, groups) + 0.1).half(),
    }
    made = plain(said, stored).packed("w.weight")
    assert made is not None
    return made, bits + 16 / 128 + 8 * size / 4 / NUM_IN


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
        f"gptq {bits} bits g{group}{', zeros' * has_zeros}": partial(_gptq, bits, group, has_zeros)
        for bits in (2, 3, 4, 8)
        for group in (32, 128)
        for has_zeros in (False, True)
    },
    **{f"codebook of {bits} bits": partial(_codebook, bits) for bits in (2, 3, 4)},
    "fp8 in blocks": _fp8_blocks,
    "nf4 of two levels": _nf4_of_two_levels,
    "nvfp4": _nvfp4,
}
# By how much more than the file, on a CPU and on a GPU; None: within 3 %.
WIDER: dict[str, tuple[float | None, float | None]] = {
    "Q3_K": (0.327, None),
    "TQ1_0": (0.222, 0.222),
    "gptq 2 bits g32, zeros": (0.073, 0.073),
    "gptq 3 bits g32": (0.286, None),
    "gptq 3 bits g32, zeros": (0.322, 0.043),
    "gptq 3 bits g128": (0.320, None),
    "gptq 3 bits g128, zeros": (0.330, None),
    "nf4 of two levels": (0.091, 0.091),
    "codebook of 2 bits": (0.949, 0.993),
    "codebook of 3 bits": (0.323, 0.353),
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
