"""bitsandbytes: what the package wrote comes out as it reads it, and damage is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import CheckpointError, NotSupported
from quire.quant.codebook import Codebook
from quire.quant.coded import Coded
from tests.load.held import plain, vectors

CASES = vectors("bitsandbytes")
STATE = "w.weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_package(case: str) -> None:
    """Red when the low bits come first, blocks begin anew in each row, or nested scales lose their
    offset. Only nested scales and eight bits are rounded elsewhere than in the package."""
    vector = CASES[case]
    stored = plain(vector.said, vector.tensors)
    assert list(stored.names()) == ["w.weight"]
    assert stored.shape("w.weight") == tuple(vector.want.shape)
    packed = stored.packed("w.weight")
    assert isinstance(packed, Coded if case == "int8" else Codebook)
    got = packed.dequantize()
    if case in ("nf4nested", "int8"):
        assert torch.allclose(got, vector.want, rtol=1e-6, atol=1e-9)
    else:
        assert torch.equal(got, vector.want)
    assert torch.equal(stored.read("w.weight"), got)


def state(**changes: Any) -> Tensor:
    said = {"quant_type": "nf4", "blocksize": 4, "dtype": "float32", "shape": [2, 8]}
    return torch.tensor(list(json.dumps({**said, **changes}).encode()), dtype=torch.uint8)


def by_hand(**changes: Any) -> dict[str, Tensor]:
    return {
        "w.weight": torch.arange(8, dtype=torch.uint8)[:, None] * 16 + 15,
        "w.weight.absmax": torch.tensor([2, 0, 1, 3], dtype=torch.uint8),
        "w.weight.quant_map": torch.arange(16.0),
        "w.weight.nested_absmax": torch.tensor([10.0, 100.0]),
        "w.weight.nested_quant_map": torch.arange(256.0),
        STATE: state(**{"nested_blocksize": 2, "nested_offset": 0.5, **changes}),
    }


def test_the_layout_by_its_definition() -> None:
    """Red when a scale takes another nested one: 2 * 10, 0 * 10, 1 * 100, 3 * 100, each + 0.5."""
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    got = plain(said, by_hand()).read("w.weight")
    codes = torch.tensor([x for i in range(8) for x in (i, 15)]).view(2, 8)
    scales = torch.tensor([20.5, 0.5, 100.5, 300.5]).repeat_interleave(4).view(2, 8)
    assert torch.equal(got, codes * scales)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({STATE: None}, "no tensor w.weight.quant_state.bitsandbytes__nf4 or fp4"),
        ({STATE: state(shape=[2**20, 2**20])}, r"w.weight has shape \(8, 1\), want 549755813888"),
        ({STATE: state(shape=[2])}, r"says shape \(2,\), want two"),
        ({STATE: state(blocksize=0)}, "got blocksize=0, want a whole number"),
        ({STATE: torch.ones(9, dtype=torch.uint8)}, "is not JSON"),
        ({STATE: torch.ones(9000, dtype=torch.uint8)}, "want up to 4096 bytes"),
        ({STATE: state(nested_blocksize=1)}, r"nested_absmax .* want \(4,\)"),
        ({STATE: state(nested_blocksize=2, nested_offset="x")}, "nested_offset 'x', want a number"),
        ({"w.weight.absmax": torch.ones(5).byte()}, r"w.weight.absmax .* want \(4,\) of uint8"),
        ({"w.weight.quant_map": torch.ones(8)}, r"w.weight.quant_map .* want \(16,\)"),
        ({"w.weight.nested_absmax": None}, "no tensor w.weight.nested_absmax"),
    ],
)
def test_what_does_not_fit_is_named_by_headers(
    changes: dict[str, Tensor | None], words: str
) -> None:
    tensors = {name: t for name, t in {**by_hand(), **changes}.items() if t is not None}
    with pytest.raises(CheckpointError, match=words):
        plain({"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors)


def test_blocks_larger_than_the_weight() -> None:
    """Red when a block is taken for whole that the weight is only a part of."""
    tensors = by_hand(blocksize=10**7, nested_blocksize=10**7)
    tensors["w.weight.absmax"] = tensors["w.weight.absmax"][:1]
    tensors["w.weight.nested_absmax"] = tensors["w.weight.nested_absmax"][:1]
    stored = plain({"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors)
    assert stored.read("w.weight").max() == 15 * 20.5


def test_eight_bits_without_scales() -> None:
    vector = CASES["int8"]
    with pytest.raises(CheckpointError, match=r"no tensor w.SCB"):
        plain(vector.said, {"w.weight": vector.tensors["w.weight"]})
    with pytest.raises(NotSupported, match="neither load_in_4bit nor load_in_8bit"):
        plain({"quant_method": "bitsandbytes"}, vector.tensors)


def test_rows_and_columns_of_a_codebook() -> None:
    """Red when a cut has a neighbour's scales."""
    vector = CASES["nf4"]
    got = plain(vector.said, vector.tensors).packed("w.weight")
    assert isinstance(got, Codebook) and got.block == 64
    rows = torch.tensor([5, 0, 9])
    assert torch.equal(got.pick(rows).dequantize(), vector.want[rows])
    assert torch.equal(got.columns(64, 128).dequantize(), vector.want[:, 64:])
    top, rest = got.pick(slice(0, 5)), got.pick(slice(5, None))
    assert top.is_like(rest) and torch.equal(top.join(rest).dequantize(), vector.want)
    assert not top.is_like(got.columns(0, 64))
    assert got.num_bytes == 16 * 64 + 16 * 2 * 4
    with pytest.raises(ValueError, match="got inputs 0 to 32, want multiples of 64"):
        got.columns(0, 32)
