"""Eight-bit floats and NVFP4 by the definitions of their layouts, one weight at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import CheckpointError, NotSupported
from quire.load.safetensors_checkpoint import read_config
from quire.native.panels import can_be_panels
from quire.quant.coded import Coded
from quire.quant.scaled import Scaled
from tests.load.held import plain

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8 = {"quant_method": "fp8"}
BLOCKS = {**FP8, "weight_block_size": [16, 32]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def floats8(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)


def test_blocks_with_ragged_edges() -> None:
    """Red when `_inv` is taken for a divisor, or the last blocks are read as whole ones."""
    weight, scales = floats8(40, 80), torch.rand(3, 3) + 0.1
    stored = plain(BLOCKS, {"w.weight": weight, "w.weight_scale_inv": scales})
    assert list(stored.names()) == ["w.weight"]
    got, want = stored.read("w.weight"), weight.float()
    for i in range(40):
        for j in range(80):
            want[i, j] *= scales[i // 16, j // 32]
    assert torch.equal(got, want)
    packed = stored.packed("w.weight")
    assert isinstance(packed, Scaled) and packed.block == (16, 32)


def test_blocks_larger_than_the_weight() -> None:
    """Red when scales are to be spread over blocks of which most is not there."""
    weight, scales = floats8(40, 80), torch.rand(3, 1) + 0.1
    said = {**FP8, "weight_block_size": [16, 10**7]}
    packed = plain(said, {"w.weight": weight, "w.weight_scale_inv": scales}).packed("w.weight")
    assert isinstance(packed, Scaled) and packed.block == (16, 80)
    want = weight.float() * scales.repeat_interleave(16, 0)[:40]
    assert torch.equal(packed.dequantize(), want)


@pytest.mark.parametrize("said", [FP8, {"quant_method": "modelopt", "quant_algo": "FP8"}])
@pytest.mark.parametrize("shape", [(), (1,), (16,), (16, 1)])
def test_scales_of_tensors_and_rows(said: dict[str, Any], shape: tuple[int, ...]) -> None:
    weight, scale = floats8(16, 32), torch.rand(shape) + 0.1
    tensors = {"w.weight": weight, "w.weight_scale": scale, "w.input_scale": torch.ones(())}
    stored = plain(said, {**tensors, "head.weight": torch.ones(2, 2)})
    assert list(stored.names()) == ["w.weight", "head.weight"]
    assert torch.equal(stored.read("w.weight"), weight.float() * scale.reshape(-1, 1))


def test_scales_that_are_powers() -> None:
    """Red when exponents of two are read as numbers."""
    weight, exponents = floats8(16, 64), torch.tensor([[127, 130]], dtype=torch.uint8)
    for kind in (torch.uint8, torch.float8_e8m0fnu):
        tensors = {"w.weight": weight, "w.weight_scale_inv": exponents.view(kind)}
        got = plain(BLOCKS, tensors).read("w.weight")
        want = torch.cat((weight[:, :32].float(), weight[:, 32:].float() * 8), 1)
        assert torch.equal(got, want)


def test_nvfp4_is_multiplied() -> None:
    """Red when nibbles are swapped, or the second scale divides as compressed-tensors' does."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (6, 64), generator=generator)
    scales = (torch.rand(6, 4, generator=generator) + 0.5).to(torch.float8_e4m3fn)
    tensors = {
        "w.weight": (codes[:, ::2] + codes[:, 1::2] * 16).byte(),
        "w.weight_scale": scales,
        "w.weight_scale_2": torch.tensor(0.25),
    }
    stored = plain(MODELOPT, tensors)
    packed = stored.packed("w.weight")
    assert isinstance(packed, Coded) and packed.block == 16 and can_be_panels(packed)
    got = stored.read("w.weight")
    assert torch.equal(packed.dequantize(), got)
    for i in range(6):
        for j in range(64):
            code = int(codes[i, j])
            value = E2M1[code & 7] * (-1 if code > 7 else 1)
            assert got[i, j] == value * float(scales[i, j // 16]) * 0.25


@pytest.mark.parametrize(
    "said, tensors, words",
    [
        (FP8, {}, "no tensor w.weight_scale, without which"),
        (BLOCKS, {"w.weight_scale_inv": torch.ones(2, 2)}, r"want as many as .* or \(3, 3\)"),
        (FP8, {"w.weight_scale": torch.ones(7)}, r"w.weight_scale has shape \(7,\)"),
        (FP8, {"w.weight_scale": torch.ones(1, dtype=torch.int32)}, "want numbers that weights"),
        ({**FP8, "weight_block_size": [128]}, {}, r"got weight_block_size=\[128\], want two"),
        ({**FP8, "weight_block_size": [0, 128]}, {}, "want two whole numbers, 1 or more"),
    ],
)
def test_what_does_not_fit_is_named(
    said: dict[str, Any], tensors: dict[str, Tensor], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        plain(said, {"w.weight": floats8(40, 80), **tensors})


def test_what_modelopt_has_more() -> None:
    with pytest.raises(NotSupported, match="got quant_algo='W4A16_AWQ' of modelopt, of which only"):
        plain({**MODELOPT, "quant_algo": "W4A16_AWQ"}, {})
    with pytest.raises(NotSupported, match=r"w.pre_quant_scale scales the inputs"):
        plain(MODELOPT, {"w.pre_quant_scale": torch.ones(4)})


def test_a_file_beside_the_config(tmp_path: Path) -> None:
    """Red when weights whose config says nothing are read as plain ones."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    said = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    assert read_config(tmp_path)["quantization_config"] == {**MODELOPT, "group_size": 16}
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null}}')
    assert "quantization_config" not in read_config(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": 4}')
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json has no quantization object"):
        read_config(tmp_path)


SCALE = {"w.weight_scale": torch.ones(4)}
GIVEN = {**SCALE, "w.input_scale": torch.tensor(0.5)}
BLOCKS128 = {**FP8, "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    "said, tensors, want",
    [
        (FP8, GIVEN, "fp8-row"),  # dynamic
        ({**FP8, "activation_scheme": "static"}, GIVEN, "fp8-one"),
        ({**FP8, "activation_scheme": "static"}, SCALE, "fp8-row"),  # not stored
        ({"quant_method": "fbgemm_fp8"}, SCALE, "fp8-row"),
        (BLOCKS128, {"w.weight_scale_inv": torch.ones(1, 2)}, "fp8-128"),
        (BLOCKS, {"w.weight_scale_inv": torch.ones(1, 8)}, "float"),
        ({**MODELOPT, "quant_algo": "FP8"}, GIVEN, "fp8-one"),
        ({**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, SCALE, "fp8-row"),
        ({**MODELOPT, "quant_algo": "FP8_PB_WO"}, {"w.weight_scale": torch.ones(1, 2)}, "float"),
    ],
)
def test_how_inputs_are_rounded(
    said: dict[str, Any], tensors: dict[str, Tensor], want: str
) -> None:
    """Red when a scale that was found beforehand is left out, or one that was not is wanted."""
    packed = plain(said, {"w.weight": floats8(4, 256), **tensors}).packed("w.weight")
    assert isinstance(packed, Scaled) and packed.inputs == want
    assert packed.input_scale == (0.5 if want == "fp8-one" else None)


def test_scales_of_inputs_that_cannot_be() -> None:
    for wrong in (torch.tensor(0.0), torch.ones(2)):
        tensors = {"w.weight": floats8(4, 256), **SCALE, "w.input_scale": wrong}
        stored = plain({**FP8, "activation_scheme": "static"}, tensors)
        with pytest.raises(CheckpointError, match=r"w.input_scale .* want one number above zero"):
            stored.packed("w.weight")
    with pytest.raises(CheckpointError, match="activation_scheme"):
        plain({**FP8, "activation_scheme": "often"}, {"w.weight": floats8(4, 256), **SCALE})
