"""Every code of every form through the assembly that makes floats of it.

Red when a mask, a shift or a constant is wrong: what comes out is compared with what
`tests/coded_case.py` says the codes stand for, to the bit.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.code_pairs import CONVERTS, TEXTS
from tests import assembly
from tests.coded_case import all_values

ALL = [(*which, text) for which, text in TEXTS.items()] + [("fp8", "fp16", CONVERTS)]


@pytest.mark.parametrize("form, dtype, text", ALL)
def test_every_code_beside_every_other(form: str, dtype: str, text: str) -> None:
    parts = 4 if form == "int4" else 2
    words = np.arange(1 << 16, dtype=np.uint16)  # with every code in every part
    registers = words.astype(np.uint32) | words[::-1].astype(np.uint32) << 16
    made = assembly.run(text, [registers], parts)
    for part, x in enumerate(made):
        for half, of in ((x & 0xFFFF, words), (x >> 16, words[::-1])):
            bits = torch.from_numpy(half.astype(np.uint16).view(np.int16).copy())
            got = bits.view(torch.bfloat16 if dtype == "bf16" else torch.float16).double()
            code = of >> (16 // parts * part) & (1 << 16 // parts) - 1
            want, is_code = meant(form, code.astype(np.int64))
            assert np.array_equal(got.numpy()[is_code], want[is_code]), (form, dtype, part)


def meant(form: str, code: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(numbers, whether there is such a code)"""
    values = all_values(form)
    if form == "int4":
        return values[code], code >= 0
    if form == "int8":
        signed = code.astype(np.int8).astype(np.int64)
        return values[np.maximum(signed, -127) + 127], signed > -128
    size, middle = code & 0x7F, len(values) // 2
    is_code = size < 0x7F
    size = np.minimum(size, 0x7E)
    return np.where(code > 0x7F, -1.0, 1.0) * values[middle + size], is_code
