"""Weights that are no numbers: every method names them, none writes them or hides them."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quire.compress.methods import ALL
from quire.errors import CheckpointError
from tests.compress.models import run, small

LAST = "model.layers.1.mlp.down_proj.weight"  # no product reads what it gives
FILE = "model.safetensors"


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize(("name", "value"), [(LAST, float("nan")), ("model.norm.weight", -1e400)])
def test_a_number_that_is_none_is_named(
    method: str, name: str, value: float, tmp_path: Path
) -> None:
    """Red when a method writes what is not finite, hides it behind codes, or fails without saying
    which tensor of which file it is and what to do."""
    model = small(tmp_path)
    tensors = load_file(model / FILE)
    tensors[name].view(-1)[3] = value
    save_file(tensors, model / FILE, metadata={"format": "pt"})
    more = {"layers": 1} if method == "shrink" else {}
    more |= {"storage": "Q4_0"} if method == "gguf" else {}
    with pytest.raises(CheckpointError, match=rf"{name} in .*{FILE} is not finite.*fetch it anew"):
        run(model, tmp_path / "out", method, **more)
    assert not (tmp_path / "out" / "config.json").exists()


def test_the_file_of_many_is_named(tmp_path: Path) -> None:
    """Red when a model of several files is blamed on another of them."""
    model = small(tmp_path)
    run(model, tmp_path / "pruned", "magnitude", reconstruct=False)
    shard = tmp_path / "pruned" / "model-00003-of-00003.safetensors"
    tensors = load_file(shard)
    tensors[LAST][0, 0] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{LAST} in .*{shard.name} is not finite"):
        run(tmp_path / "pruned", tmp_path / "out", "rtn")
