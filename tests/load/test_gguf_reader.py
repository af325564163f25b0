"""The reader against hand-made bytes: what it parses, and every way a header can lie to it.

A diff that allocates or loops on a number before checking it turns the bombs here into hangs.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.errors import CheckpointError
from quire.load.gguf import GGUFFile
from quire.load.gguf_types import GGML_TYPES

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def text(s: str | bytes) -> bytes:
    data = s.encode() if isinstance(s, str) else s
    return u64(len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + u32(kind) + value


def tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def gguf(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    num_tensors: int | None = None,
    num_pairs: int | None = None,
    alignment: int = 32,
) -> bytes:
    head = b"GGUF" + u32(version)
    head += u64(len(tensors) if num_tensors is None else num_tensors)
    head += u64(len(pairs) if num_pairs is None else num_pairs)
    head += b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data


def opened(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return GGUFFile.open(path)


@pytest.mark.parametrize("version", [2, 3])
def test_every_metadata_type(tmp_path: Path, version: int) -> None:
    pairs = [
        pair("u8", U8, b"\xff"),
        pair("i8", I8, b"\xff"),
        pair("u16", U16, b"\xff\xff"),
        pair("i16", I16, b"\xff\xff"),
        pair("u32", U32, u32(2**32 - 1)),
        pair("i32", I32, u32(2**32 - 1)),
        pair("f32", F32, struct.pack("<f", 0.5)),
        pair("bool", BOOL, b"\1"),
        pair("string", STRING, text("日本")),
        pair("u64", U64, u64(2**64 - 1)),
        pair("i64", I64, u64(2**64 - 1)),
        pair("f64", F64, struct.pack("<d", 0.1)),
        pair("strings", ARRAY, u32(STRING) + u64(3) + text("a") + text("") + text("é")),
        pair("ints", ARRAY, u32(I32) + u64(3) + struct.pack("<3i", 1, -2, 3)),
        pair("bools", ARRAY, u32(BOOL) + u64(2) + b"\1\0"),
        pair("nested", ARRAY, u32(ARRAY) + u64(1) + u32(U8) + u64(2) + b"\1\2"),
        pair("none", ARRAY, u32(F32) + u64(0)),
    ]
    file = opened(tmp_path, gguf(pairs, version=version))
    got = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in file.metadata.items()}
    assert file.version == version
    assert isinstance(file.metadata["ints"], np.ndarray)
    assert file.metadata["bool"] is True
    got["nested"] = [a.tolist() for a in got["nested"]]
    assert got == {
        "u8": 255, "i8": -1, "u16": 65535, "i16": -1, "u32": 2**32 - 1, "i32": -1, "f32": 0.5,
        "bool": True, "string": "日本", "u64": 2**64 - 1, "i64": -1, "f64": 0.1,
        "strings": ["a", "", "é"], "ints": [1, -2, 3], "bools": [True, False],
        "nested": [[1, 2]], "none": [],
    }  # fmt: skip


def test_tensors_are_row_major_and_native_types_stay(tmp_path: Path) -> None:
    f32 = np.arange(6, dtype="<f4")
    half = np.arange(4, dtype="<f2")
    brain = torch.tensor([1.0, -2.5]).bfloat16()
    data = f32.tobytes().ljust(32, b"\0") + half.tobytes().ljust(32, b"\0")
    data += brain.view(torch.uint8).numpy().tobytes()
    infos = [tensor("a", [3, 2], 0, 0), tensor("b", [4], 1, 32), tensor("c", [2], 30, 64)]
    file = opened(tmp_path, gguf([], infos, data))
    assert file.tensors["a"].shape == (2, 3)
    assert torch.equal(file.read("a"), torch.arange(6.0).view(2, 3))
    assert torch.equal(file.read("b"), torch.arange(4).half())
    assert torch.equal(file.read("c"), brain)
    assert file.raw("a").shape == (2, 12)


def test_blocks_are_kept_raw_and_decoded(tmp_path: Path) -> None:
    block = struct.pack("<e", 0.5) + bytes(range(32))
    file = opened(tmp_path, gguf([], [tensor("q", [32, 2], 8, 0)], block * 2))
    assert file.raw("q").tolist() == [list(block)] * 2
    assert torch.equal(file.read("q"), (torch.arange(32) * 0.5).expand(2, 32))


def test_every_block_type_is_read(tmp_path: Path) -> None:
    """Red when a type has a size but no decoder. A scale of zero makes zeros."""
    for kind in GGML_TYPES.values():
        size, count = kind.block_size, 2 * kind.block_bytes
        file = opened(tmp_path, gguf([], [tensor("w", [size, 2], kind.id, 0)], b"\0" * count))
        assert file.read("w").shape == (2, size), kind.name
        assert file.read("w").abs().max() == 0, kind.name


@pytest.mark.parametrize("scale", [float("inf"), float("-inf"), float("nan")])
def test_scale_that_is_no_number_is_named(tmp_path: Path, scale: float) -> None:
    blocks = [struct.pack("<e", d) + bytes(range(32)) for d in (0.5, 2.0**-24, scale)]
    content = gguf([], [tensor("blk.0.w", [32, 3], 8, 0)], b"".join(blocks))
    file = opened(tmp_path, content)
    for read in (file.read, file.raw):
        with pytest.raises(CheckpointError, match=r"'blk\.0\.w' = .*2 of Q8_0.*is not finite"):
            read("blk.0.w")


def test_writing_to_a_view_leaves_the_file_alone(tmp_path: Path) -> None:
    content = gguf([], [tensor("a", [2], 0, 0)], b"\0" * 8)
    file = opened(tmp_path, content)
    file.read("a").fill_(1.0)
    assert (tmp_path / "model.gguf").read_bytes() == content


def test_alignment_from_metadata(tmp_path: Path) -> None:
    pairs = [pair("general.alignment", U32, u32(256))]
    infos = [tensor("a", [1], 0, 0), tensor("b", [1], 0, 256)]
    data = struct.pack("<f", 1.0).ljust(256, b"\0") + struct.pack("<f", 2.0)
    file = opened(tmp_path, gguf(pairs, infos, data, alignment=256))
    assert [file.read(n).item() for n in "ab"] == [1.0, 2.0]


def nested(depth: int) -> bytes:
    return (u32(ARRAY) + u64(1)) * depth + u32(U8) + u64(1) + b"\0"


BOMBS: dict[str, tuple[bytes, str]] = {
    "not gguf": (b"PK\3\4" + b"\0" * 60, "magic"),
    "empty": (b"", "cannot be opened"),
    "only magic": (b"GGUF", "version"),
    "version 1": (gguf(version=1), "versions 2 and 3"),
    "big endian": (gguf(version=3 << 24), "big-endian"),
    "tensor count": (gguf(num_tensors=2**60), "tensor_count = 1152921504606846976"),
    "pair count": (gguf(num_pairs=2**60), "metadata_kv_count = 1152921504606846976"),
    "key length": (gguf([u64(2**63) + b"x" * 40]), "9223372036854775808"),
    "empty key": (gguf([pair("", U8, b"\0")]), "metadata key 0"),
    "key not utf-8": (gguf([text(b"\xff\xfe") + u32(U8) + b"\0"]), "UTF-8"),
    "same key twice": (gguf([pair("k", U8, b"\0")] * 2), "appears twice"),
    "metadata type": (gguf([pair("k", 99, b"\0" * 8)]), "unknown metadata type"),
    "bool of 2": (gguf([pair("k", BOOL, b"\2")]), "0 or 1"),
    "string length": (gguf([pair("k", STRING, u64(2**63))]), "'k' = 9223372036854775808"),
    "string not utf-8": (gguf([pair("k", STRING, text(b"\xc3"))]), "UTF-8"),
    "array length": (gguf([pair("k", ARRAY, u32(U8) + u64(2**40))]), "1099511627776"),
    "array wraps": (gguf([pair("k", ARRAY, u32(U64) + u64(2**61))]), "'k'"),
    "strings length": (gguf([pair("k", ARRAY, u32(STRING) + u64(2**40))]), "1099511627776"),
    "string in array": (gguf([pair("k", ARRAY, u32(STRING) + u64(1) + u64(2**63))]), r"'k'\[0\]"),
    "array not utf-8": (gguf([pair("k", ARRAY, u32(STRING) + u64(1) + text(b"\xff"))]), r"'k'\[0"),
    "arrays length": (gguf([pair("k", ARRAY, u32(ARRAY) + u64(2**40))]), "1099511627776"),
    "element type": (gguf([pair("k", ARRAY, u32(77) + u64(1))]), "77"),
    "nesting": (gguf([pair("k", ARRAY, nested(50_000))]), "nested"),
    "alignment 0": (gguf([pair("general.alignment", U32, u32(0))]), "power of two"),
    "alignment 48": (gguf([pair("general.alignment", U32, u32(48))]), "power of two"),
    "alignment text": (gguf([pair("general.alignment", STRING, text("8"))]), "power of two"),
    "dimensions": (gguf([], [tensor("w", [1] * 5, 0, 0)], b"\0" * 64), "at most 4"),
    "no rows": (gguf([], [tensor("w", [32, 0], 0, 0)]), "zero"),
    "size wraps": (gguf([], [tensor("w", [2**32, 2**32], 0, 0)], b"\0" * 64), "past the end"),
    "size wraps to 0": (gguf([], [tensor("w", [2**63] * 4, 0, 0)], b"\0" * 64), "past the end"),
    "cut short": (gguf([], [tensor("w", [32], 0, 0)], b"\0" * 127), "past the end"),
    "offset": (gguf([], [tensor("w", [1], 0, 2**63)], b"\0" * 64), "past the end"),
    "misaligned": (gguf([], [tensor("w", [1], 0, 4)], b"\0" * 64), "alignment 32"),
    "tensor type": (gguf([], [tensor("w", [1], 4, 0)], b"\0" * 64), "'w' = 4: unknown"),
    "row not in blocks": (gguf([], [tensor("w", [33], 8, 0)], b"\0" * 99), "multiples of 32"),
    "same name twice": (gguf([], [tensor("w", [1], 0, 0)] * 2, b"\0" * 64), "appears twice"),
    "overlap": (
        gguf([], [tensor("v", [16], 0, 0), tensor("w", [1], 0, 32)], b"\0" * 64),
        "overlaps tensor 'v'",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_lies_are_named_at_once(tmp_path: Path, name: str) -> None:
    content, says = BOMBS[name]
    began = time.perf_counter()
    with pytest.raises(CheckpointError, match=says) as error:
        opened(tmp_path, content)
    assert time.perf_counter() - began < 1.0
    assert "model.gguf" in str(error.value)
    assert len(str(error.value)) < 600


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    pairs = [pair("k", ARRAY, u32(STRING) + u64(2) + text("ab") + text("c"))]
    whole = gguf(pairs, [tensor("w", [8], 0, 0)], b"\0" * 32)
    opened(tmp_path, whole)
    for length in range(len(whole)):
        with pytest.raises(CheckpointError):
            opened(tmp_path, whole[:length])


def test_no_such_file_or_tensor(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf"):
        GGUFFile.open(tmp_path / "nowhere.gguf")
    with pytest.raises(CheckpointError):
        GGUFFile.open(tmp_path)
    file = opened(tmp_path, gguf([], [tensor("w", [1], 0, 0)], b"\0" * 4))
    with pytest.raises(CheckpointError, match="no tensor 'v'"):
        file.read("v")


def test_a_large_vocabulary_parses_quickly(tmp_path: Path) -> None:
    count = 100_000
    words = b"".join(text(f"token{i}") for i in range(count))
    types = np.ones(count, "<i4").tobytes()
    content = gguf(
        [
            pair("tokens", ARRAY, u32(STRING) + u64(count) + words),
            pair("types", ARRAY, u32(I32) + u64(count) + types),
        ]
    )
    began = time.perf_counter()
    file = opened(tmp_path, content)
    assert time.perf_counter() - began < 1.0  # 0.05 s when the machine is idle
    assert file.metadata["tokens"][-1] == "token99999"
