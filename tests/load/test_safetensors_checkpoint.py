"""Reading model folders: every dtype, single files and shards, views not copies."""

from __future__ import annotations

import gc
import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from quire.errors import CheckpointError, OutOfMemory
from quire.load import safetensors_checkpoint as checkpoint_module
from quire.load.safetensors_checkpoint import DTYPES, SafetensorsCheckpoint, Shard, read_config


def make_folder(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def random_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {f"t.{name}": (torch.randn(3, 5) * 9).to(dtype) for name, dtype in DTYPES.items()}
    return tensors | {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "big": torch.randn(999),
    }


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Bit by bit: casting may make NaN, which equals nothing.
    return a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)


def _bytes(t: torch.Tensor) -> list[int]:
    return t.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_reads_what_was_written(tmp_path: Path) -> None:
    tensors = random_tensors()
    checkpoint = SafetensorsCheckpoint.open(make_folder(tmp_path, tensors))
    assert set(checkpoint.names()) == set(tensors)
    assert checkpoint.config == {"model_type": "llama"}
    for name, tensor in tensors.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert same(checkpoint.read(name), tensor), name


def test_views_share_the_mapping_and_leave_the_file_alone(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"w": torch.ones(8)})
    checkpoint = SafetensorsCheckpoint.open(folder)
    first, second = checkpoint.read("w"), checkpoint.read("w")
    assert first.data_ptr() == second.data_ptr()
    first.add_(1)
    del checkpoint, second
    gc.collect()
    assert first.tolist() == [2.0] * 8  # the view keeps the mapping alive
    assert SafetensorsCheckpoint.open(folder).read("w").tolist() == [1.0] * 8


def test_shards(tmp_path: Path) -> None:
    tensors = random_tensors()
    folder = make_folder(tmp_path, {})
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = SafetensorsCheckpoint.open(folder)
    assert sorted(checkpoint.names()) == names
    files = [weight_map[name] for name in checkpoint.names()]
    assert files == sorted(files)  # one file after the other
    assert all(same(checkpoint.read(name), tensors[name]) for name in names)


def test_unaligned_data_is_copied(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {})
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (5 - len(header) % 4)  # off by one from any alignment
    data = torch.tensor([1.5, -2.0]).numpy().tobytes()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    assert SafetensorsCheckpoint.open(folder).read("w").tolist() == [1.5, -2.0]


def test_bytes_that_are_no_bool_read_as_true(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"b": torch.tensor([True, False])})
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-2] + b"\x07\x00")
    assert SafetensorsCheckpoint.open(folder).read("b").tolist() == [True, False]


def test_unknown_tensor(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint.open(make_folder(tmp_path, {"w": torch.ones(1)}))
    for method in (checkpoint.read, checkpoint.shape):
        with pytest.raises(CheckpointError, match="no tensor 'v' among the 1"):
            method("v")


def test_a_file_in_memory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when tensors of a file that was loaded whole are still read from the disk, or a part of
    it was not copied."""
    monkeypatch.setattr("quire.load.safetensors_checkpoint.COPIED_AT_ONCE", 1000)
    folder = make_folder(tmp_path, {"w": torch.arange(100_000.0)})
    shard = Shard(folder / "model.safetensors")
    assert len(shard.load()) == (folder / "model.safetensors").stat().st_size
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert torch.equal(shard.read("w"), torch.arange(100_000.0))


@pytest.mark.parametrize("how", ["shrinks", "grows", "is another"])
def test_a_file_that_is_written_while_it_is_copied(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the process dies, or tensors are half of one file and half of another."""
    path = make_folder(tmp_path, {"w": torch.arange(100_000.0)}) / "model.safetensors"
    shard, check = Shard(path), Shard._check_size

    def write(self: Shard) -> None:
        check(self)
        if how == "is another":
            (tmp_path / "new").write_bytes(path.read_bytes())
            (tmp_path / "new").replace(path)
        else:
            os.truncate(path, 1000 if how == "shrinks" else 1_000_000)

    monkeypatch.setattr(Shard, "_check_size", write)
    with pytest.raises(CheckpointError, match=r"model.safetensors was written while it was read"):
        shard.load()


def test_a_file_that_shrinks_under_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, {"w": torch.arange(100_000.0)})
    shard, read = Shard(folder / "model.safetensors"), checkpoint_module._read_part

    def truncated(fd: int, copy: NDArray[np.uint8], begin: int) -> bool:
        os.truncate(shard.path, 1000)
        return read(fd, copy, begin)

    monkeypatch.setattr(checkpoint_module, "_read_part", truncated)
    with pytest.raises(CheckpointError, match="was written while it was read"):
        shard.load()


def test_a_copy_that_memory_has_no_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when it is no error of ours, which ends the engine."""

    def none(*shape: int, **asked: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nand more")

    shard = Shard(make_folder(tmp_path, {"w": torch.ones(4)}) / "model.safetensors")
    monkeypatch.setattr(torch, "empty", none)
    with pytest.raises(
        OutOfMemory, match=r"bytes of host memory for a file \(CUDA error: out of memory\)"
    ):
        shard.load()


def test_file_that_shrinks_while_open(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"w": torch.ones(100_000)})
    checkpoint = SafetensorsCheckpoint.open(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match="shrank from"):
        checkpoint.read("w")


def test_file_replaced_while_open_does_no_harm(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"w": torch.ones(1000)})
    checkpoint = SafetensorsCheckpoint.open(folder)
    (folder / "new").write_bytes(b"")
    (folder / "new").replace(folder / "model.safetensors")
    assert checkpoint.read("w").sum() == 1000


def test_folders_without_weights_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config.json in .*gguf"):
        SafetensorsCheckpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no model.safetensors .* found config.json"):
        SafetensorsCheckpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin.*convert them to safetensors"):
        SafetensorsCheckpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[]", "want an object"),
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a": 1, "a": 2}', "appears twice"),
        (b" " * 8_000_001, "larger than"),
    ],
)
def test_bad_config(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=reason):
        read_config(tmp_path)
