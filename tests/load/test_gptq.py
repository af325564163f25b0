"""GPTQ: what GPTQModel wrote comes out as GPTQModel reads it, and damage is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import CheckpointError, NotSupported
from quire.native.panels import can_be_panels
from quire.quant.coded import Coded
from tests.load.held import Vector, plain, vectors

CASES = vectors("gptq")


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_package(case: str) -> None:
    """Red when codes or zeros are unpacked in another order, v1's zeros are off by one, or inputs
    of scattered groups are mixed up. The package rounds its products to fp16."""
    vector = CASES[case]
    stored = plain(vector.said, vector.tensors)
    assert list(stored.names()) == ["w.weight"]
    assert stored.shape("w.weight") == tuple(vector.want.shape)
    assert torch.equal(stored.read("w.weight").half(), vector.want)
    packed = stored.packed("w.weight")
    assert isinstance(packed, Coded) and torch.equal(packed.dequantize().half(), vector.want)
    bits, want_bits = vector.said["bits"], {3: 4}
    assert packed.bits == want_bits.get(bits, bits)
    assert (packed.order is not None) == (case == "ordered4")
    assert can_be_panels(packed)
    assert (packed.zeros is None) == vector.said["sym"]


def by_hand(bits: int, v1: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Written from the definition, one code at a time: [in = 64, out = 32], groups of 32."""
    torch.manual_seed(bits)
    codes, zeros = torch.randint(0, 2**bits, (64, 32)), torch.randint(0, 2**bits, (2, 32))
    scales = torch.rand(2, 32).half()

    def words(values: list[int]) -> list[int]:
        stream = sum(value << bits * i for i, value in enumerate(values))
        found = [stream >> 32 * i & 0xFFFFFFFF for i in range(len(values) * bits // 32)]
        return [word - (1 << 32 if word >> 31 else 0) for word in found]

    kept = (zeros - 1) % 2**bits if v1 else zeros
    tensors = {
        "w.qweight": torch.tensor([words(c) for c in codes.t().tolist()], dtype=torch.int32).t(),
        "w.qzeros": torch.tensor([words(z) for z in kept.tolist()], dtype=torch.int32),
        "w.scales": scales,
    }
    group = torch.arange(64) // 32
    return tensors, ((codes - zeros[group]) * scales[group].float()).t()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("v1", [True, False])
def test_the_layout_by_its_definition(bits: int, v1: bool) -> None:
    """Red when a zero of 0, which v1 stores as all ones, does not wrap around; without g_idx."""
    tensors, want = by_hand(bits, v1)
    kind = "gptq" if v1 else "gptq_v2"
    said = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": kind}
    assert torch.equal(plain(said, tensors).read("w.weight"), want)


def test_dynamic_rules() -> None:
    """Red when a rule is matched against another name, or the first does not win."""
    tensors, want = by_hand(4, True)
    said = {"quant_method": "gptq", "bits": 8, "group_size": 64}
    rules = {"-:other": {}, "+:.*w$": {"bits": 4, "group_size": 32}, "w": {"bits": 2}}
    got = plain({**said, "dynamic": rules}, tensors).read("w.weight")
    assert torch.equal(got, want)
    with pytest.raises(CheckpointError, match="says under dynamic that w is not quantised"):
        plain({**said, "dynamic": {"-:w": {}}}, tensors)


def test_small_groups_come_as_floats() -> None:
    """Red when groups of 8, smaller than any block, are read as if they were larger."""
    tensors, _ = by_hand(4, True)
    scales = torch.rand(8, 32).half()
    tensors |= {"w.scales": scales, "w.qzeros": torch.full((8, 4), 0x77777777, dtype=torch.int32)}
    said = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    got = plain(said, tensors).read("w.weight")
    again = plain(
        {**said, "group_size": -1},
        {**tensors, "w.qzeros": tensors["w.qzeros"][:1], "w.scales": torch.ones(1, 32)},
    )
    want = again.read("w.weight") * scales.float().repeat_interleave(8, 0).t()
    assert torch.equal(got, want)


def damaged(**changes: Tensor | None) -> Vector:
    found = CASES["ordered4"]
    tensors = {**found.tensors, **{f"w.{name}": tensor for name, tensor in changes.items()}}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return Vector(found.said, kept, found.want)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"scales": None}, "no tensor w.scales, without which"),
        ({"g_idx": None}, "no tensor w.g_idx"),
        ({"scales": torch.ones(3, 32)}, r"w.scales has shape \(3, 32\) .* want \(2, 32\)"),
        ({"qzeros": torch.ones(2, 4)}, r"w.qzeros .* of float32, want \(2, 4\) of int32"),
        ({"qweight": torch.ones(8, dtype=torch.int32)}, "w.qweight .* want two dimensions"),
        ({"qweight": torch.ones(8, 30, dtype=torch.int32)}, "whole numbers of codes of 4 bits"),
    ],
)
def test_what_does_not_fit_is_named_by_headers(changes: dict[str, Any], words: str) -> None:
    vector = damaged(**changes)
    with pytest.raises(CheckpointError, match=words):
        plain(vector.said, vector.tensors)


def test_bad_numbers_are_named_when_they_are_read() -> None:
    scales = CASES["ordered4"].tensors["w.scales"].clone()
    scales[1, 3] = torch.inf
    vector = damaged(scales=scales)
    with pytest.raises(CheckpointError, match=r"w.scales has inf among its scales, want finite"):
        plain(vector.said, vector.tensors).read("w.weight")
    vector = damaged(g_idx=torch.full((64,), 2, dtype=torch.int32))
    with pytest.raises(CheckpointError, match=r"w.g_idx has groups from 2 to 2, want 0 to 1"):
        plain(vector.said, vector.tensors).packed("w.weight")


@pytest.mark.parametrize(
    "said, words",
    [
        ({"bits": 5}, "got bits=5, of which only 2, 3, 4, 8 are read"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format='marlin', of which only gptq and"),
        ({"bits": "four"}, "got bits='four', want a whole number"),
        ({"group_size": 0}, "got group_size=0, want a whole number"),
        ({"dynamic": {"+:(": {}}}, r"got '\(', want a regular expression"),
        ({"dynamic": {"x": 4}}, "want an object"),
        ({"dynamic": [1]}, r"got dynamic=\[1\], want an object"),
    ],
)
def test_unknown_variants_are_refused(said: dict[str, Any], words: str) -> None:
    vector = CASES["sym4"]
    with pytest.raises((NotSupported, CheckpointError), match=words):
        plain({**vector.said, **said}, vector.tensors)
