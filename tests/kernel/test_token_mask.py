"""The mask kernel must ban exactly what the CPU path bans, whatever the shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels import token_mask
from quire.sample.inputs import TokenMask
from quire.sample.mask import apply_mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 257])
def test_against_the_cpu(
    vocab_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when words, bits, the sign bit, tiles or strides are mixed up."""
    monkeypatch.setattr(token_mask, "BLOCK", 64)
    rng = np.random.default_rng(vocab_size)
    wide = torch.randn(6, vocab_size + 9).to(dtype)
    logits = wide[:, :vocab_size]  # rows further apart than they are long
    words = rng.integers(-(2**31), 2**31, (3, -(-vocab_size // 32)), dtype=np.int32)
    words[0] = -1
    bits, rows = torch.from_numpy(words), torch.tensor([4, 0, 5])
    want = logits.clone()
    apply_mask(want, TokenMask(rows, bits))
    wide = wide.to(DEVICE)
    beside = wide[:, vocab_size:].clone()
    token_mask.ban_unset(wide[:, :vocab_size], rows.to(DEVICE), bits.to(DEVICE))
    assert torch.equal(wide[:, :vocab_size].cpu(), want)
    assert torch.equal(wide[:, vocab_size:], beside), "wrote past the vocabulary"


def test_no_masks() -> None:
    """Red when an empty step launches an empty grid."""
    logits = torch.zeros(2, 40, device=DEVICE)
    empty = torch.empty(0, dtype=torch.int64, device=DEVICE)
    token_mask.ban_unset(logits, empty, torch.empty(0, 2, dtype=torch.int32, device=DEVICE))
    assert not logits.any()
