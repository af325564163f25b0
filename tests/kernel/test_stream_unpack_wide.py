"""Every code of eight bits, and of a table, through the assembly that makes weights of it.

Red when a selector, a shift or a constant is wrong, or when a weight is rounded twice: what comes
out is compared with (value - zero) * scale in fp32, rounded once, to the bit.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.stream_unpack_wide import _TEXTS
from quire.quant.load_forms import load_form
from tests import assembly

DTYPES = (torch.bfloat16, torch.float16)
SCALES = (1.0, 0.0123, 3.7e-5, 1.0 + 2.0**-9, 0.3333333)


def _words(x: Tensor) -> np.ndarray:
    return x.float().numpy().view(np.uint32)


def _made(kind: int, dtype: torch.dtype, codes: np.ndarray, beside: np.ndarray, scale: float):
    """Bytes [words, 4] as the weights of their places."""
    text = _TEXTS.value[2 * kind + DTYPES.index(dtype)]
    word = np.ascontiguousarray(codes).view(np.uint32).reshape(-1)
    scales = np.full(word.shape, np.float32(scale).view(np.uint32))
    unused = [beside] * 3
    first, second = assembly.run(text, [word, beside, *unused, scales], 2)
    halves = [first & 0xFFFF, second & 0xFFFF, first >> 16, second >> 16]
    bits = np.stack(halves, -1).astype(np.uint16).view(np.int16)
    return torch.from_numpy(bits.copy()).view(dtype)


def _some_bytes() -> np.ndarray:
    """Every byte in every place, beside others."""
    own = np.arange(256, dtype=np.uint8)
    return np.stack([np.roll(own, 37 * i) for i in range(4)], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("zero", [0, -7, 128])
def test_signed_bytes(dtype: torch.dtype, scale: float, zero: int) -> None:
    codes = _some_bytes()
    beside = np.full(len(codes), np.float32(8388736.0 + zero).view(np.uint32))
    value = torch.from_numpy(codes.view(np.int8).copy()).float() - zero
    want = (value * torch.tensor(scale)).to(dtype)
    assert torch.equal(_made(0, dtype, codes, beside, scale), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES)
def test_floats_of_eight_bits(dtype: torch.dtype, scale: float) -> None:
    codes = _some_bytes()
    value = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float()
    is_number = ~value.isnan()
    want = (value * torch.tensor(scale)).to(dtype)
    got = _made(1, dtype, codes, np.zeros(len(codes), np.uint32), scale)
    assert torch.equal(got[is_number], want[is_number])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("field", [0, 1])
def test_a_table(dtype: torch.dtype, scale: float, field: int) -> None:
    weight = load_form("nf4").of(torch.randn(1, 64))
    values = torch.tensor(weight.values, dtype=torch.float32)  # type: ignore[union-attr]
    codes = _some_bytes()
    code = torch.from_numpy((codes >> 4 * field & 15).astype(np.int64))
    want = (values[code] * torch.tensor(scale)).to(dtype)
    lanes = _words(values.repeat(2))  # lane i has value i % 16
    assert torch.equal(_made(2 + field, dtype, codes, lanes, scale), want)
