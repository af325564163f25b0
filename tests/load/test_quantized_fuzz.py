"""Quantised checkpoints from strangers: any value in the config, any damage to a tensor. A clear
error or a weight comes out, and never one of another shape than was promised."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import QuireError
from tests.load.held import Vector, plain, vectors
from tests.load.hostile import VALUES

FILES = ("gptq", "awq", "auto-round", "compressed-tensors", "bitsandbytes")
FIELDS = ("dynamic", "extra_config", "version", "checkpoint_format", "ignore", "sparsity_config")
MAX_MESSAGE = 600


def load(said: Any, tensors: dict[str, Tensor]) -> None:
    try:
        stored = plain(said, tensors)
        for name in stored.names():
            shape = stored.shape(name)
            packed = stored.packed(name)
            assert packed is None or packed.shape == shape
            assert tuple(stored.read(name).shape) == shape
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


def some(name: str) -> Iterator[Vector]:
    yield from list(vectors(name).values())[-3:]


@pytest.mark.parametrize("name", FILES)
def test_any_config(name: str) -> None:
    for vector in some(name):
        for said in changed(vector.said):
            load(said, vector.tensors)


@pytest.mark.parametrize("name", FILES)
def test_any_damage(name: str) -> None:
    draw = random.Random(0)
    for vector in vectors(name).values():
        for path, tensor in vector.tensors.items():
            for hurt in damaged(tensor, draw):
                load(vector.said, {**vector.tensors, path: hurt})
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
