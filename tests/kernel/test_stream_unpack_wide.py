"""Every code through the assembly that makes weights of it by way of fp32.

Red when a selector, a shift or a constant is wrong, or when a weight is rounded twice: what comes
out is compared with (value - zero) * scale + offset in fp32, rounded to the bit.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.stream_unpack_wide import _FLOATS, _INTS, _PLANES, _TABLE, first_text
from quire.quant.load_forms import load_form
from tests import assembly

DTYPES = (torch.bfloat16, torch.float16)
SCALES = (1.0, 0.0123, 3.7e-5, 1.0 + 2.0**-9, 0.3333333)


def _bits(x: float) -> int:
    return int(np.float32(x).view(np.uint32))


def _made(
    text: str, dtype: torch.dtype, planes: list[np.ndarray], beside: np.ndarray, *numbers: float
) -> Tensor:
    """Bytes [words, 4] as the weights of their places."""
    words = [np.ascontiguousarray(plane).view(np.uint32).reshape(-1) for plane in planes]
    fours = [np.full(words[0].shape, _bits(x), np.uint32) for x in numbers for _ in range(4)]
    first, second = assembly.run(text, [*words, *[beside] * 4, *fours], 2)
    halves = [first & 0xFFFF, second & 0xFFFF, first >> 16, second >> 16]
    bits = np.stack(halves, -1).astype(np.uint16).view(np.int16)
    return torch.from_numpy(bits.copy()).view(dtype)


def _some_bytes() -> np.ndarray:
    """Every byte in every place, beside others."""
    own = np.arange(256, dtype=np.uint8)
    return np.stack([np.roll(own, 37 * i) for i in range(4)], -1)


def _codes(low: int, high: int, field: int, planes: list[np.ndarray]) -> Tensor:
    if low == 8:
        return torch.from_numpy(planes[0].view(np.int8).copy()).float()
    code = planes[0].astype(np.int64) >> low * (field % (8 // low)) & (1 << low) - 1
    if high:
        above = planes[1].astype(np.int64) >> high * (field % (8 // high)) & (1 << high) - 1
        code |= above << low
    return torch.from_numpy(code).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("low, high", _PLANES)
def test_whole_numbers(low: int, high: int, dtype: torch.dtype) -> None:
    planes = [_some_bytes(), _some_bytes()[::-1]]
    more, zero = 2.0**23 + (128 if low == 8 else 0), 7.0
    beside = np.full(256, _bits(more + zero), np.uint32)
    for field in range(_PLANES[low, high]):
        at = first_text(low, high) + 4 * field + DTYPES.index(dtype)
        value = _codes(low, high, field, planes) - zero
        for scale in SCALES:
            want = (value * torch.tensor(scale)).to(dtype)
            assert torch.equal(_made(_INTS.value[at], dtype, planes, beside, scale, 0.0), want)
        # As k-quants have them: products of few digits, which are exact, and an offset.
        scale, offset = 37 * 0.00030517578125, -21 * 0.0011444091796875
        want = (value * torch.tensor(scale) + torch.tensor(offset)).to(dtype)
        assert torch.equal(_made(_INTS.value[at + 2], dtype, planes, beside, scale, offset), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES)
def test_floats_of_eight_bits(dtype: torch.dtype, scale: float) -> None:
    codes = _some_bytes()
    value = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float()
    is_number = ~value.isnan()
    want = (value * torch.tensor(scale)).to(dtype)
    text, unused = _FLOATS.value[DTYPES.index(dtype)], np.zeros(256, np.uint32)
    got = _made(text, dtype, [codes, codes], unused, scale, 0.0)
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
    lanes = values.repeat(2).numpy().view(np.uint32)  # lane i has value i % 16
    text = _TABLE.value[2 * field + DTYPES.index(dtype)]
    assert torch.equal(_made(text, dtype, [codes, codes], lanes, scale, 0.0), want)
