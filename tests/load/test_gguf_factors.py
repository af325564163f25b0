"""NVFP4 files as llama.cpp's converter writes them: a factor beside each weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.errors import CheckpointError
from quire.load.gguf_checkpoint import GGUFCheckpoint
from quire.native.panels import can_be_panels
from tests.load.test_gguf_checkpoint import Tensors, tensors_of, write

gguf = pytest.importorskip("gguf")
UP = ("blk.0.ffn_up", "model.layers.0.mlp.up_proj.weight")
QUERY = ("blk.1.attn_q", "model.layers.1.self_attn.q_proj.weight")  # rows are reordered
HEAD = ("output", "lm_head.weight")
QUANTISED = (UP, QUERY, HEAD)


def blocks(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Random ones: the package reads NVFP4, and does not write it."""
    made = np.random.default_rng(3).integers(0, 256, (shape[0], shape[1] // 64, 36), dtype=np.uint8)
    made[..., :4] &= 0x3F
    return made.reshape(shape[0], -1)


def opened(path: Path, **factors: Any) -> GGUFCheckpoint:
    """`factors`: of all that are quantised, by what follows their names."""
    tensors: Tensors = tensors_of("llama")
    for stem, _ in QUANTISED:
        tensors[f"{stem}.weight"] = blocks(tensors[f"{stem}.weight"].shape)
        tensors |= {f"{stem}.{end}": np.array(value) for end, value in factors.items()}
    kind = gguf.GGMLQuantizationType.NVFP4
    return GGUFCheckpoint.open(write(path, "llama", tensors, blocks_of=kind))


@pytest.mark.parametrize("factor", [0.25, 1e-30, -0.5, 0.0])
def test_factors_multiply(factor: float, tmp_path: Path) -> None:
    """Red when a factor is left out, or is another weight's; scales that kernels may not take so
    are in the floats."""
    value = np.array([factor], np.float32)
    bare = opened(tmp_path / "bare.gguf")
    beside = opened(tmp_path / "beside.gguf", scale=value, input_scale=np.ones(1, np.float32))
    assert set(beside.names()) == set(bare.names())
    for _, name in QUANTISED:
        plain, packed = bare.packed(name), beside.packed(name)
        assert plain is not None and can_be_panels(plain)
        want = plain.dequantize() * float(value[0])
        assert torch.allclose(beside.read(name), want, rtol=1e-6, atol=0)
        assert (packed is not None) == (factor == 0.25)
        if packed is not None:
            assert torch.equal(packed.dequantize(), want) and can_be_panels(packed)


@pytest.mark.parametrize(
    "value, words",
    [
        (np.array([np.nan], np.float32), "a scale is not finite"),
        (np.ones(2, np.float32), "want 1 of F32"),
        (np.ones(1, np.float16), "want 1 of F32"),
    ],
)
def test_bad_factors_are_named(value: np.ndarray[Any, Any], words: str, tmp_path: Path) -> None:
    stored = opened(tmp_path / "bad.gguf", scale=value)
    for ask in (stored.read, stored.packed):
        with pytest.raises(CheckpointError, match=rf"{UP[0]}\.scale.*{words}"):
            ask(UP[1])


def test_a_factor_of_nothing_is_left_over(tmp_path: Path) -> None:
    """Red when any tensor with such a name is dropped."""
    tensors = tensors_of("llama") | {"blk.0.ffn_gone.scale": np.ones(1, np.float32)}
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_gone\.scale"):
        GGUFCheckpoint.open(write(tmp_path / "odd.gguf", "llama", tensors))
