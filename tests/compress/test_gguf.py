"""GGUF export: blocks as the gguf package reads and writes them, files that hold the same model."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from quire.compress.ggml_blocks import BLOCK_SIZES, fitting, quantise
from quire.compress.source import Source
from quire.errors import NotSupported
from quire.load.gguf_checkpoint import GGUFCheckpoint
from quire.models.tiny import tiny_model
from tests.compress.models import hidden, run

# Squared relative error on normal weights, no more than this.
LOSS = {"Q4_0": 8e-3, "Q4_1": 7e-3, "Q5_0": 2e-3, "Q5_1": 1.6e-3, "Q8_0": 4e-5}
LOSS |= {"Q4_K": 6e-3, "Q5_K": 1.5e-3, "Q6_K": 4e-4}
FAMILIES = ("llama", "qwen2", "qwen3", "gpt2", "gemma", "mixtral", "qwen2_moe", "qwen3_moe")


def weights() -> torch.Tensor:
    torch.manual_seed(0)
    made = torch.randn(32, 512) * torch.rand(32, 1)
    made[3], made[4, :300] = 0.0, 0.0
    return made


@pytest.mark.parametrize("kind", BLOCK_SIZES)
def test_the_package_reads_the_same(kind: str) -> None:
    """Red when a field of a block moves, or a search finds worse scales than it did."""
    given = weights()
    packed = quantise(given, kind)
    type_ = getattr(gguf.GGMLQuantizationType, kind)
    near = torch.from_numpy(gguf.quants.dequantize(packed.numpy(), type_))
    assert ((near - given).square().sum() / given.square().sum()).item() < LOSS[kind]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_the_package_writes_the_same(kind: str) -> None:
    """Red when rounding differs from ggml's in a single bit."""
    type_ = getattr(gguf.GGMLQuantizationType, kind)
    want = gguf.quants.quantize(weights().numpy(), type_)
    assert np.array_equal(quantise(weights(), kind).numpy(), want)


def test_rows_that_do_not_fit() -> None:
    """Red when a width that no block divides is cut off."""
    assert fitting("Q4_K", 512) == "Q4_K"
    assert fitting("Q4_K", 576) == "Q5_0" and fitting("Q6_K", 96) == "Q8_0"
    assert fitting("Q4_0", 48) == "F16"


@pytest.mark.parametrize("family", FAMILIES)
def test_files_hold_the_same_model(family: str, tmp_path: Path) -> None:
    """Red when rows are permuted the wrong way, norms lose their one or experts their order."""
    model = tiny_model(family, tmp_path / "model")
    run(model, tmp_path / "out", "gguf", storage="F32")
    (file,) = (tmp_path / "out").glob("*.gguf")
    source, made = Source.open(str(model)), Source.open(str(file))
    for name, place in made.places.items():
        theirs = next(n for n, own in source.places.items() if own.target == place.target)
        assert torch.allclose(made.read(name), source.read(theirs), atol=1e-6), name
    assert torch.allclose(hidden(file), hidden(model), atol=1e-4)
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".gguf", ".json"]


def test_a_file_of_a_file(tmp_path: Path) -> None:
    """Red when metadata is lost on the way from one GGUF file to the next."""
    model = tiny_model("llama", tmp_path / "model", hidden_size=64, intermediate_size=96)
    run(model, tmp_path / "one", "gguf", storage="Q8_0")
    (first,) = (tmp_path / "one").glob("*.gguf")
    run(first, tmp_path / "two", "gguf", storage="Q4_0")
    (second,) = (tmp_path / "two").glob("*.gguf")
    one, two = GGUFCheckpoint.open(first), GGUFCheckpoint.open(second)
    assert {**one.config} == {**two.config}
    assert two.stored("model.layers.0.mlp.up_proj.weight").form == "Q4_0"
    same = [key for key in one.file.metadata if not key.startswith("general.")]
    assert all(np.array_equal(one.file.metadata[k], two.file.metadata[k]) for k in same)
    run(second, tmp_path / "three", "rtn", group=32)  # and back to safetensors
    assert (tmp_path / "three" / "tokenizer.json").is_file()


def test_what_gguf_cannot_say(tmp_path: Path) -> None:
    """Red when a model is written that a reader takes for another one."""
    with pytest.raises(NotSupported, match="attn_scale would be lost"):
        run(tiny_model("gemma2", tmp_path / "model"), tmp_path / "out", "gguf", storage="F16")
    with pytest.raises(NotSupported, match="no GGUF architecture is known"):
        run(tiny_model("olmo2", tmp_path / "olmo"), tmp_path / "other", "gguf")
