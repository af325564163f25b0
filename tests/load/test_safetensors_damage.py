"""Damaged and hostile safetensors files: an error that names the file, never a crash or a hang."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from quire.errors import CheckpointError
from quire.load.safetensors_checkpoint import SafetensorsCheckpoint

W = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def pack(header: Any, data: bytes = b"\0" * 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def open_bytes(folder: Path, content: bytes) -> SafetensorsCheckpoint:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content)
    return SafetensorsCheckpoint.open(folder)


def with_w(**changes: Any) -> bytes:
    return pack({"w": W | changes})


DAMAGED = {
    "empty": (b"", "damaged or not safetensors"),
    "seven bytes": (b"\0" * 7, "damaged"),
    "only a length": ((8).to_bytes(8, "little"), "damaged"),
    "header longer than the file": ((1000).to_bytes(8, "little") + b"{}", "1000 bytes"),
    "header bomb": ((2**63).to_bytes(8, "little") + b"{}" * 9, "the most is 100000000"),
    "zero header": ((0).to_bytes(8, "little") + b"{}", "0 bytes"),
    "not json": (pack(b"hello"), "is not JSON"),
    "not utf-8": (pack(b'{"\xff": 1}'), "is not JSON"),
    "an array": (pack(b"[1]"), "want an object"),
    "deep nesting": (pack(b"[" * 100_000), "is not JSON"),
    "huge number": (pack(b'{"w": ' + b"9" * 10_000 + b"}"), "is not JSON"),
    "key twice": (pack(b'{"w": 1, "w": 2}'), "twice"),
    "metadata no object": (pack({"__metadata__": 1, "w": W}), "__metadata__"),
    "entry no object": (pack({"w": 3}), "not described"),
    "long name": (pack({"w" * 600: W}), "600 characters"),
    "unknown dtype": (with_w(dtype="F4"), "dtype 'F4'"),
    "dtype no string": (with_w(dtype=[1]), "dtype"),
    "negative dim": (with_w(shape=[-2]), "shape"),
    "float dim": (with_w(shape=[2.0]), "shape"),
    "bool dim": (with_w(shape=[True, 2]), "shape"),
    "shape no list": (with_w(shape="2"), "shape"),
    "too many dims": (with_w(shape=[1] * 17 + [2]), "shape"),
    "overflowing dims": (with_w(shape=[2**40, 2**40]), "too large"),
    "zero beside huge": (with_w(shape=[0, 2**62, 2], data_offsets=[0, 0]), "too large"),
    "no offsets": (pack({"w": {"dtype": "F32", "shape": [2]}}), "data_offsets"),
    "offsets reversed": (with_w(data_offsets=[8, 0]), "data_offsets"),
    "offsets negative": (with_w(data_offsets=[-8, 0]), "data_offsets"),
    "three offsets": (with_w(data_offsets=[0, 8, 16]), "data_offsets"),
    "past the end": (with_w(data_offsets=[8, 16]), "leaves a gap"),
    "size differs": (with_w(shape=[3]), "takes 12 bytes, its data has 8"),
    "truncated data": (pack({"w": W}, b"\0" * 7), "the file at"),
    "data left over": (pack({"w": W}, b"\0" * 9), "the file at"),
    "overlap": (pack({"v": W, "w": W}), "overlaps"),
    "partial overlap": (
        pack({"v": W, "w": W | {"data_offsets": [4, 12]}}, b"\0" * 12),
        "overlaps",
    ),
    "gap": (pack({"v": W, "w": W | {"data_offsets": [12, 20]}}, b"\0" * 20), "leaves a gap"),
    "no tensors, some data": (pack({}), "the file at"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    content, reason = DAMAGED[name]
    with pytest.raises(CheckpointError, match=reason) as caught:
        open_bytes(tmp_path, content)
    assert "model.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("shard", "reason"),
    [
        ("../secret.safetensors", "beside it"),
        ("/etc/passwd", "beside it"),
        ("sub/x.safetensors", "beside it"),
        ("..\\x.safetensors", "beside it"),
        ("..", "beside it"),
        ("", "beside it"),
        ("x\0.safetensors", "beside it"),
        ("model.bin", "beside it"),
        (7, "beside it"),
        ("gone.safetensors", "missing"),
        ("there.safetensors", "does not hold it"),
    ],
)
def test_index_cannot_lead_outside_or_astray(tmp_path: Path, shard: Any, reason: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    good = save({"v": torch.ones(2)})
    (folder / "there.safetensors").write_bytes(good)
    (tmp_path / "secret.safetensors").write_bytes(save({"w": torch.ones(2)}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(CheckpointError, match=reason):
        SafetensorsCheckpoint.open(folder)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {}}])
def test_index_without_a_map(tmp_path: Path, index: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        SafetensorsCheckpoint.open(tmp_path)


def small_file() -> bytes:
    return save(
        {
            "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
            "b": torch.ones(4, dtype=torch.bfloat16),
            "c": torch.tensor([True, False]),
            "d": torch.zeros(0, 7),
        },
        {"format": "pt"},
    )


def read_all(folder: Path, content: bytes) -> bool:
    """Whether the file was accepted; if so every tensor must be readable."""
    try:
        checkpoint = open_bytes(folder, content)
    except CheckpointError:
        return False
    for name in checkpoint.names():
        assert tuple(checkpoint.read(name).shape) == checkpoint.shape(name)
        checkpoint.read(name).clone()
    return True


def test_every_header_byte_flipped(tmp_path: Path) -> None:
    content = small_file()
    end = 8 + int.from_bytes(content[:8], "little")
    for i in range(end):
        for flip in (0x01, 0xFF):
            damaged = bytearray(content)
            damaged[i] ^= flip
            read_all(tmp_path, bytes(damaged))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = small_file()
    assert read_all(tmp_path, content)
    for length in range(len(content)):
        assert not read_all(tmp_path, content[:length])


def test_random_mutations(tmp_path: Path) -> None:
    content, chance = small_file(), random.Random(7)
    for _ in range(500):
        damaged = bytearray(content)
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(damaged))
            kind = chance.random()
            if kind < 0.6:
                damaged[at] = chance.choice(b'0123456789[]{},:"FUB \xff\0')
            elif kind < 0.8:
                del damaged[at : at + chance.randint(1, 8)]
            else:
                damaged[at:at] = bytes(chance.choices(b"0123456789,[]", k=chance.randint(1, 8)))
            if not damaged:
                break
        read_all(tmp_path, bytes(damaged))


def test_lies_about_size_take_no_memory(tmp_path: Path) -> None:
    shape = [2**20, 2**20]
    content = with_w(shape=shape, data_offsets=[0, 2**42])
    tracemalloc.start()
    with pytest.raises(CheckpointError):
        open_bytes(tmp_path, content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000
