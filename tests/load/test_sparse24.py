"""2:4 weights: read as the reference package wrote them, and written as it reads them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.compress.layouts import sparse24
from quire.errors import CheckpointError
from quire.quant.sparse24 import Sparse24
from tests.load.held import plain, vectors

CASES = vectors("compressed-tensors-24", "compressed-tensors")


@pytest.mark.parametrize("case", CASES)
def test_values_stand_where_the_package_puts_them(case: str) -> None:
    """Red when a bit of the mask stands for another input, or a value for another bit."""
    vector = CASES[case]
    stored = plain(vector.said, vector.tensors)
    assert stored.names() == ["w.weight"] and stored.shape("w.weight") == vector.want.shape
    assert torch.equal(stored.read("w.weight"), vector.want)
    packed = stored.packed("w.weight")
    assert packed is not None and torch.equal(packed.dequantize(), vector.want)
    made = sparse24.pack(vector.want)
    for last, tensor in made.items():
        assert torch.equal(tensor, vector.tensors[f"w.{last}"]), last


def test_a_run_may_have_more_zeros() -> None:
    """Red when a weight that is zero by itself moves its neighbours."""
    weight = torch.tensor([[0.0, 0.0, 0.0, 5.0], [0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 2.0]])
    assert torch.equal(Sparse24.of(weight).dequantize(), weight)
    with pytest.raises(ValueError, match="want 2:4"):
        Sparse24.of(torch.ones(1, 4))


def test_the_form() -> None:
    """Red when rows or columns are picked without their places."""
    weight = torch.randn(6, 16).view(6, 4, 4)
    weight[..., 1:3] = 0.0
    want = weight.view(6, 16).bfloat16()
    sparse, rows = Sparse24.of(want), torch.tensor([4, 0, 2])
    assert torch.equal(sparse.pick(rows).dequantize(), want[rows])
    assert torch.equal(sparse.columns(4, 12).dequantize(), want[:, 4:12])
    both = sparse.pick(slice(0, 2)).join(sparse.pick(slice(2, 6)))
    assert both.is_like(sparse) and torch.equal(both.dequantize(), want)
    assert sparse.num_bytes * 16 == want.numel() * 2 * 9
    with pytest.raises(ValueError, match="multiples of 4"):
        sparse.columns(2, 6)


@pytest.mark.parametrize(
    ("last", "bad", "message"),
    [
        ("bitmask", torch.full((12, 3), 7, dtype=torch.uint8), "not two are kept"),
        ("bitmask", torch.zeros(12, 2, dtype=torch.uint8), r"w\.bitmask has shape \(12, 2\)"),
        ("shape", torch.tensor([[12], [28]]), r"w\.shape says \[12, 28\]"),
        ("compressed", torch.zeros(12, 11), r"w\.(compressed|bitmask)"),
    ],
)
def test_damage_is_named(last: str, bad: torch.Tensor, message: str) -> None:
    """Red when a file whose parts do not fit is read as something."""
    vector = CASES["bf16-24"]
    wrong = replace(vector, tensors={**vector.tensors, f"w.{last}": bad})
    with pytest.raises(CheckpointError, match=message):
        plain(wrong.said, wrong.tensors).read("w.weight")
