"""compressed-tensors: what the package wrote comes out as it reads it, and damage is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import CheckpointError, NotSupported
from quire.load.compressed_groups import Groups
from quire.quant.coded import Coded
from quire.quant.scaled import Scaled
from tests.load.held import plain, vectors

CASES = vectors("compressed-tensors")
CASES |= vectors("compressed-tensors-padded", "compressed-tensors")
FP8 = ("fp8tensor", "fp8channel", "fp8block", "mxfp8")
INPUTS = {"int8": "int8-row", "fp8tensor": "fp8-row", "fp8channel": "fp8-row"}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_package(case: str) -> None:
    """Red when words are read in another order, zeros along the wrong side, a global scale is
    multiplied with, or blocks at an edge get a neighbour's scale. Packages round to bf16."""
    vector = CASES[case]
    stored = plain(vector.said, vector.tensors)
    assert list(stored.names()) == ["w.weight"]
    assert stored.shape("w.weight") == tuple(vector.want.shape)
    packed = stored.packed("w.weight")
    assert packed is not None and packed.shape == tuple(vector.want.shape)
    want = vector.want.bfloat16()
    assert torch.equal(packed.dequantize().bfloat16(), want)
    assert torch.equal(stored.read("w.weight").bfloat16(), want)
    assert isinstance(packed, Scaled) == (case in FP8)
    if case != "odd4":  # 44 inputs are no whole number of blocks
        assert isinstance(packed, Scaled | Coded)
    assert packed.inputs == INPUTS.get(case, "float")


def two_groups(**changes: Any) -> dict[str, Any]:
    eight = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}
    four = {"targets": ["re:.*w$"], "weights": {"num_bits": 4, "strategy": "channel"}}
    groups = {"a": eight, "b": {**four, **changes}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


def test_names_come_before_classes() -> None:
    """Red when the first group wins, though another one names the projection."""
    vector = CASES["channel4"]
    for targets in (["re:.*w$"], ["w"]):
        got = plain(two_groups(targets=targets), vector.tensors).read("w.weight")
        assert torch.equal(got.bfloat16(), vector.want)
    groups = Groups.of(two_groups())
    assert groups.scheme_of("model.up").bits == 8 and groups.scheme_of("model.w").bits == 4
    with pytest.raises(CheckpointError, match="has no group for x among its 2 config_groups"):
        Groups.of({"config_groups": {i: {"targets": ["y"]} for i in "ab"}}).scheme_of("x")


def test_scattered_groups() -> None:
    """Red when weight_g_idx is not followed, or one that was never set is."""
    vector = CASES["sym4"]
    straight = plain(vector.said, vector.tensors).read("w.weight")
    unset = {**vector.tensors, "w.weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}
    assert torch.equal(plain(vector.said, unset).read("w.weight"), straight)
    group = torch.arange(64, dtype=torch.int32) % 2
    turned = plain(vector.said, {**vector.tensors, "w.weight_g_idx": group}).packed("w.weight")
    assert isinstance(turned, Coded) and turned.order is not None
    scales = vector.tensors["w.weight_scale"].float()
    want = straight / scales.repeat_interleave(32, 1) * scales[:, group.long()]
    assert torch.allclose(turned.dequantize(), want)


def test_what_is_not_quantised_is_left_alone() -> None:
    vector = CASES["sym4"]
    head = {"lm_head.weight": torch.ones(3, 3).bfloat16(), "norm.weight": torch.ones(3)}
    stored = plain(vector.said, {**vector.tensors, **head})
    assert list(stored.names()) == ["w.weight", "lm_head.weight", "norm.weight"]
    assert torch.equal(stored.read("lm_head.weight"), head["lm_head.weight"])


@pytest.mark.parametrize(
    "case, changes, words",
    [
        ("sym4", {"weight_scale": None}, "no tensor w.weight_scale, without which"),
        ("int8", {"weight_scale": None}, "no tensor w.weight_scale, without which"),
        ("fp8block", {"weight_scale": None}, "no tensor w.weight_scale, without which"),
        ("sym4", {"weight_shape": torch.tensor([16, 10**15])}, "says 16 by 1000000000000000, and"),
        ("sym4", {"weight_shape": torch.tensor([17, 64])}, "says 17 by 64, and yet"),
        ("sym4", {"weight_shape": torch.tensor([16, -64])}, "says 16 by -64, and yet"),
        ("sym4", {"weight_scale": torch.ones(16, 3)}, r"w.weight_scale .* want \(16, 2\)"),
        (
            "asym4",
            {"weight_zero_point": torch.ones(3, 2).int()},
            r"zero_point .* want \(2, 2\) of int32",
        ),
        ("fp8block", {"weight_scale": torch.ones(3, 3)}, r"\(1, 1\) or \(24, 1\) or \(2, 3\)"),
        ("fp8tensor", {"weight_scale": torch.ones(16, 4)}, r"\(1, 1\) or \(16, 1\)"),
        ("nvfp4", {"weight_scale": torch.ones(16, 4)}, "of float32, want .* of float8_e4m3fn"),
        ("nvfp4", {"weight_global_scale": torch.ones(2)}, "w.weight_global_scale .* want one"),
        ("mxfp4", {"weight_scale": torch.ones(16, 3).byte()}, r"want \(16, 2\) of uint8"),
    ],
)
def test_what_does_not_fit_is_named_by_headers(
    case: str, changes: dict[str, Tensor | None], words: str
) -> None:
    vector = CASES[case]
    tensors = {**vector.tensors, **{f"w.{name}": tensor for name, tensor in changes.items()}}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=words):
        plain(vector.said, kept)


@pytest.mark.parametrize(
    "case, name, value, words",
    [
        ("sym4", "weight_scale", torch.nan, "w.weight_scale has nan among its scales"),
        ("fp8tensor", "weight_scale", torch.inf, "w.weight_scale has inf among its scales"),
        ("nvfp4", "weight_global_scale", 0.0, "w.weight_global_scale is 0.0, want more than 0"),
        ("nvfp4", "weight_global_scale", 1e-40, "w.weight_global_scale has inf among its scales"),
        ("nvfp4", "weight_scale", torch.nan, "w.weight_scale has nan among its scales"),
        ("mxfp4", "weight_scale", 255, "w.weight_packed: got 255 among the exponents"),
        ("mxfp8", "weight_scale", 255, "w.weight_scale has 255 among its exponents"),
    ],
)
def test_bad_numbers_are_named(case: str, name: str, value: float, words: str) -> None:
    vector = CASES[case]
    bad = vector.tensors[f"w.{name}"].clone()
    bad.view(-1)[-1] = value
    with pytest.raises(CheckpointError, match=words):
        plain(vector.said, {**vector.tensors, f"w.{name}": bad}).read("w.weight")
    with pytest.raises(CheckpointError, match=words):
        plain(vector.said, {**vector.tensors, f"w.{name}": bad}).packed("w.weight")


def _rotated(*places: str) -> dict[str, Any]:
    """SpinQuant's and QuIP's schemes, as compressed-tensors writes them."""
    applied = [{"targets": ["Linear"], "location": p, "inverse": False} for p in places]
    scheme = {"type": "hadamard", "apply": applied, "randomize": False, "head_dim": None}
    return {"config_groups": {"u": scheme}}


def test_rotations_within_the_weights_are_read() -> None:
    """Red when a checkpoint whose rotations ask for nothing at run time is refused."""
    vector = CASES["sym4"]
    for given in ({}, None, _rotated("weight_input", "weight_output")):
        stored = plain({**vector.said, "transform_config": given}, vector.tensors)
        assert torch.equal(
            stored.read("w.weight"), plain(vector.said, vector.tensors).read("w.weight")
        )


@pytest.mark.parametrize(
    "said, words",
    [
        ({"format": "marlin-24"}, "got format='marlin-24' of compressed-tensors, of which only"),
        ({"sparsity_config": {"format": "sparse-bitmask"}}, "sparse weights are not read"),
        ({"transform_config": _rotated("input")}, "got a transform_config with location='input'"),
        ({"transform_config": _rotated("q_attn")}, "of which only weight_input and weight_output"),
        ({"transform_config": {"config_groups": {"u": 1}}}, "transform_config with location=None"),
        ({"config_groups": [1]}, r"got config_groups=\[1\], want an object"),
        ({"config_groups": {"a": 1}}, "got 1 among config_groups, want objects"),
        ({"config_groups": {"a": {"targets": "Linear"}}}, "got targets='Linear', want a list"),
        ({"config_groups": {"a": {"targets": ["re:("]}}}, "want a regular expression"),
        ({"config_groups": {"a": {"targets": [], "weights": {"num_bits": 9}}}}, "want at most 8"),
        ({"config_groups": {"a": {"targets": [], "weights": {"group_size": 0}}}}, "group_size=0"),
        (
            {"config_groups": {"a": {"targets": [], "weights": {"block_structure": [0, 1]}}}},
            r"got block_structure=\[0, 1\], want two whole numbers",
        ),
    ],
)
def test_unknown_variants_are_refused(said: dict[str, Any], words: str) -> None:
    vector = CASES["sym4"]
    with pytest.raises((NotSupported, CheckpointError), match=words):
        plain({**vector.said, **said}, vector.tensors)


def _fp8(inputs: dict[str, Any] | None) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    said = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return {**said, "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    "inputs, want",
    [
        (None, "float"),
        ({"dynamic": True, "strategy": "token"}, "fp8-row"),
        ({"dynamic": True, "strategy": "tensor"}, "fp8-row"),
        ({"dynamic": True, "strategy": "group", "group_size": 128}, "fp8-128"),
        ({"dynamic": True, "strategy": "group", "group_size": 64}, "float"),
        ({"dynamic": False, "strategy": "tensor"}, "fp8-one"),
        ({"dynamic": True, "strategy": "token", "symmetric": False}, "float"),
        ({"dynamic": True, "strategy": "token", "num_bits": 4}, "float"),
    ],
)
def test_inputs_of_eight_bit_floats(inputs: dict[str, Any] | None, want: str) -> None:
    """Red when a scheme is taken for another, or a scale for a batch would follow the batch."""
    given = None if inputs is None else {"num_bits": 8, "type": "float", **inputs}
    weight = torch.ones(4, 256).to(torch.float8_e4m3fn)
    tensors = {"w.weight": weight, "w.weight_scale": torch.ones(4, 1)}
    stored = plain(_fp8(given), {**tensors, "w.input_scale": torch.tensor([0.5])})
    packed = stored.packed("w.weight")
    assert isinstance(packed, Scaled) and packed.inputs == want
    assert packed.input_scale == (0.5 if want == "fp8-one" else None)
