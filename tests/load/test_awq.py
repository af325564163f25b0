"""AWQ: what AutoAWQ wrote comes out as AutoAWQ reads it, and damage is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import CheckpointError, NotSupported
from quire.native.panels import can_be_panels
from quire.quant.coded import Coded
from tests.load.held import plain, vectors

CASES = vectors("awq")


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_package(case: str) -> None:
    """Red when outputs are interleaved otherwise or zeros get one more. The package rounds its
    products to fp16."""
    vector = CASES[case]
    stored = plain(vector.said, vector.tensors)
    assert list(stored.names()) == ["w.weight"]
    assert stored.shape("w.weight") == tuple(vector.want.shape)
    packed = stored.packed("w.weight")
    assert isinstance(packed, Coded) and torch.equal(packed.dequantize().half(), vector.want)
    assert torch.equal(stored.read("w.weight"), packed.dequantize())
    assert can_be_panels(packed)


def test_the_layout_by_its_definition() -> None:
    """Red when a code is looked for at another place of its word: one code of 3 at a time."""
    for output, place in enumerate((0, 4, 1, 5, 2, 6, 3, 7)):
        words = torch.tensor([[3 << 4 * place]] * 32, dtype=torch.int64).int()
        tensors = {"w.qweight": words, "w.scales": torch.ones(1, 8).half()}
        tensors["w.qzeros"] = torch.zeros(1, 1, dtype=torch.int32)
        said = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32}
        got = plain(said, tensors).read("w.weight")
        assert torch.equal(got.nonzero()[:, 0].unique(), torch.tensor([output]))
        assert got.sum() == 3 * 32


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"scales": torch.ones(1, 32)}, r"w.scales has shape \(1, 32\) .* want \(2, 32\)"),
        ({"qzeros": torch.ones(2, 2).int()}, r"w.qzeros .* want \(2, 4\) of int32"),
        ({"qweight": torch.ones(64, 4)}, "w.qweight .* of float32, want two dimensions of int32"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Tensor], words: str) -> None:
    vector = CASES["g32"]
    tensors = {**vector.tensors, **{f"w.{name}": tensor for name, tensor in changes.items()}}
    with pytest.raises(CheckpointError, match=words):
        plain(vector.said, tensors)


@pytest.mark.parametrize(
    "said, words",
    [
        ({"bits": 3}, "got bits=3, of which only 4 are read"),
        ({"version": "gemv"}, "got version='gemv' of an awq checkpoint, of which only gemm"),
        ({"group_size": 48}, "got group_size=48 for w, which has 64 inputs"),
        ({"group_size": "x"}, "got group_size='x', want a whole number"),
    ],
)
def test_unknown_variants_are_refused(said: dict[str, Any], words: str) -> None:
    vector = CASES["g32"]
    with pytest.raises((NotSupported, CheckpointError), match=words):
        plain({**vector.said, **said}, vector.tensors)
