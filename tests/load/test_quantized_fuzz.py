"""Quantised checkpoints from strangers: any value in the config, any damage to a tensor. A clear
error or a weight comes out, and never one of another shape than was promised, or one with a scale
that is no number."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import CheckpointError, NotSupported, QuireError
from tests.load.held import Vector, plain, vectors
from tests.load.hostile import VALUES

FILES = ("gptq", "awq", "auto-round", "compressed-tensors", "bitsandbytes")
# Refused by name, in words that say what is read.
NOT_READ = ("torchao", "hqq", "exl3", "aqlm", "vptq", "quark", "higgs", "spqr", "eetq", "", 4, None)
FIELDS = (
    "dynamic",
    "extra_config",
    "version",
    "checkpoint_format",
    "ignore",
    "sparsity_config",
    "transform_config",
)
MAX_MESSAGE = 600


def load(said: Any, tensors: dict[str, Tensor], are_numbers: bool = False) -> None:
    try:
        stored = plain(said, tensors)
        for name in stored.names():
            shape = stored.shape(name)
            packed = stored.packed(name)
            assert packed is None or packed.shape == shape
            weight = stored.read(name)
            assert tuple(weight.shape) == shape
            assert not are_numbers or not bool(weight.isnan().any())
    except QuireError as error:
        assert len(str(error)) < MAX_MESSAGE


def changed(said: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """With one field after the other, however deep, replaced by one value after the other."""
    for key in dict.fromkeys([*said, *FIELDS]):
        if key == "quant_method":
            continue
        for value in VALUES:
            yield {**said, key: value}
        if isinstance(inner := said.get(key), Mapping):
            yield from ({**said, key: other} for other in changed(inner))


def made() -> dict[str, dict[str, Vector]]:
    """Layouts that no package here writes, from their definitions."""
    draw = torch.Generator().manual_seed(0)
    eight = torch.randn(40, 64, generator=draw).to(torch.float8_e4m3fn)
    codes = torch.randint(0, 256, (40, 32), generator=draw, dtype=torch.uint8)
    ternary = torch.randint(0, 3, (8, 32), generator=draw, dtype=torch.uint8)
    blocks = torch.randint(0, 256, (2, 6, 2, 16), generator=draw, dtype=torch.uint8)
    small = torch.randint(118, 130, (2, 6, 2), generator=draw, dtype=torch.uint8)
    nothing = torch.empty(0)
    fp8, ones = {"quant_method": "fp8"}, torch.ones(3, 2)
    floats = {
        "w.weight": eight,
        "w.weight_scale": torch.ones(40, 1),
        "w.input_scale": torch.ones(1),
    }
    nvfp4 = {"w.weight": codes, "w.weight_scale": torch.ones(40, 4).to(torch.float8_e4m3fn)}
    nvfp4 |= {"w.weight_scale_2": torch.tensor(0.5)}
    experts = {"w.experts.down_proj_blocks": blocks, "w.experts.down_proj_scales": small}
    return {
        "fp8": {
            "blocks": Vector(
                {**fp8, "weight_block_size": [16, 32]},
                {"w.weight": eight, "w.weight_scale_inv": ones},
                nothing,
            ),
            "rows": Vector({**fp8, "activation_scheme": "static"}, floats, nothing),
        },
        "modelopt": {
            "fp8": Vector({"quant_method": "modelopt", "quant_algo": "FP8"}, floats, nothing),
            "nvfp4": Vector({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4, nothing),
        },
        "mxfp4": {"experts": Vector({"quant_method": "mxfp4"}, experts, nothing)},
        "bitnet": {
            "packed": Vector(
                {"quant_method": "bitnet", "linear_class": "bitlinear"},
                {"w.weight": ternary, "w.weight_scale": torch.tensor([0.5])},
                nothing,
            )
        },
    }


def nvfp4_scales(byte: int) -> Tensor:
    """Scales of NVFP4, the last of them another byte."""
    scales = torch.ones(40, 4).to(torch.float8_e4m3fn)
    scales.view(torch.uint8)[-1, -1] = byte
    return scales


def mxfp4_scales(exponent: int) -> Tensor:
    """Scales of MXFP4 experts, the last of them another exponent."""
    scales = torch.full((2, 6, 2), 127, dtype=torch.uint8)
    scales[-1, -1, -1] = exponent
    return scales


MADE = made()


def every(name: str) -> dict[str, Vector]:
    return MADE[name] if name in MADE else vectors(name)


def some(name: str) -> Iterator[Vector]:
    yield from list(every(name).values())[-3:]


def test_layouts_from_definitions_load() -> None:
    """Red when a case of the damage below is refused from the start."""
    for cases in MADE.values():
        for vector in cases.values():
            stored = plain(vector.said, vector.tensors)
            assert all(stored.read(name).isfinite().all() for name in stored.names())


@pytest.mark.parametrize("name", (*FILES, *MADE))
def test_any_config(name: str) -> None:
    for vector in some(name):
        for said in changed(vector.said):
            load(said, vector.tensors)


@pytest.mark.parametrize("name", (*FILES, *MADE))
def test_any_damage(name: str) -> None:
    draw = random.Random(0)
    for vector in every(name).values():
        for path, tensor in vector.tensors.items():
            for hurt in damaged(tensor, draw):
                # Floats that are weights themselves are as they are, numbers or not.
                is_scale = tensor is not vector.tensors.get("w.weight")
                load(vector.said, {**vector.tensors, path: hurt}, is_scale)
            load(vector.said, {k: v for k, v in vector.tensors.items() if k != path})


def damaged(tensor: Tensor, draw: random.Random) -> Iterator[Tensor]:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).clone()
    raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    yield raw.view(tensor.dtype).reshape(tensor.shape)
    yield torch.full_like(raw, 255).view(tensor.dtype).reshape(tensor.shape)
    yield tensor.reshape(-1)
    yield tensor.reshape(1, -1)
    yield tensor.reshape(-1)[0]
    yield tensor.unsqueeze(0)
    yield tensor[:0] if tensor.ndim else tensor.reshape(1)
    yield tensor[:-1] if tensor.ndim else tensor.reshape(1, 1)
    for dtype in (torch.float32, torch.int32, torch.uint8, torch.int8, torch.float8_e4m3fn):
        yield torch.ones(tensor.shape, dtype=dtype)


@pytest.mark.parametrize("method", NOT_READ)
def test_what_is_not_read_is_refused_by_name(method: object) -> None:
    """Red when such weights would load as noise, or the answer does not say what does load."""
    with pytest.raises(NotSupported, match=r"quant_method=.*only bitnet, gptq, awq, .* are read"):
        plain({"quant_method": method}, {"w.weight": torch.ones(4, 4)})


@pytest.mark.parametrize(
    "name, case, changes, words",
    [
        ("fp8", "rows", {"w.weight_scale": torch.full((40, 1), torch.nan)}, "has nan among"),
        ("fp8", "rows", {"w.weight_scale": torch.ones(39, 1)}, r"w.weight_scale has shape"),
        ("modelopt", "nvfp4", {"w.weight_scale_2": torch.tensor(torch.inf)}, "has inf among"),
        ("modelopt", "nvfp4", {"w.weight_scale": torch.ones(40, 3)}, r"want \(40, 4\)"),
        ("modelopt", "nvfp4", {"w.weight_scale": nvfp4_scales(0x7F)}, "has nan among"),
        ("mxfp4", "experts", {"w.experts.down_proj_scales": mxfp4_scales(255)}, "blocks: got 255"),
        ("mxfp4", "experts", {"w.experts.down_proj_scales": torch.zeros(1, 6, 2).byte()}, "want"),
        ("bitnet", "packed", {"w.weight_scale": torch.zeros(1)}, "want one number, not 0"),
        ("bitnet", "packed", {"w.weight_scale": torch.ones(3)}, "want one number"),
        ("bitnet", "packed", {"w.weight_scale": None}, "no tensor w.weight_scale, without which"),
    ],
)
def test_damage_is_named(
    name: str, case: str, changes: dict[str, Tensor | None], words: str
) -> None:
    vector = MADE[name][case]
    hurt = {name: t for name, t in {**vector.tensors, **changes}.items() if t is not None}
    with pytest.raises(CheckpointError, match=words):
        stored = plain(vector.said, hurt)
        for each in stored.names():
            stored.read(each)
