"""Damaged files: whatever the bytes, only CheckpointError comes out, soon and in little memory.

The file under test goes the whole way: header, config, names, every tensor, tokenizer.
"""

from __future__ import annotations

import random
import re
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from quire.errors import CheckpointError, QuireError
from quire.load.fit import check_fit
from quire.load.gguf import GGUFFile
from quire.load.gguf_checkpoint import GGUFCheckpoint
from quire.models.registry import spec_of
from quire.text.gguf_vocab import tokenizer_from_gguf
from tests.load import hostile
from tests.rules.source import PACKAGE

gguf = pytest.importorskip("gguf")

MUTATIONS = 800
MAX_SECONDS = 1.0
MAX_BYTES = 32 << 20  # the file is some 20 KiB
TOKENS = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581a", "\u2581ab"]
HUGE = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A one-layer llama with a SentencePiece vocabulary, two tensors of it quantised."""
    path = tmp_path_factory.mktemp("fuzz") / "valid.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([-float(i) for i in range(len(TOKENS))])
    writer.add_token_types([2, 3, 3, 1, 1, 1, 1, 1, 4])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    rng = np.random.default_rng(3)
    names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    shapes = {f"blk.0.{name}.weight": (32, 32) for name in names}
    shapes |= {f"blk.0.{name}_norm.weight": (32,) for name in ("attn", "ffn")}
    shapes |= {"token_embd.weight": (len(TOKENS), 32), "output_norm.weight": (32,)}
    shapes |= {"rope_freqs.weight": (8,)}
    for name, shape in shapes.items():
        values = rng.random(shape, dtype=np.float32) + 0.5
        if name.startswith(("blk.0.ffn_up", "blk.0.attn_q.")):
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def load_all(path: Path) -> None:
    checkpoint = GGUFCheckpoint.open(path)
    check_fit(checkpoint, spec_of(checkpoint.config))
    for name in checkpoint.names():
        assert tuple(checkpoint.read(name).shape) == checkpoint.shape(name)
    vocab = tokenizer_from_gguf(checkpoint.file.metadata, str(path))
    vocab.tokenizer.encode("ab a")


def damage(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    header = content.index(b"output_norm.weight") + 64  # what follows is mostly plain weights
    kind = rng.randrange(5)
    at = rng.randrange(header)
    if kind == 0:
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(header)] = rng.randrange(256)
    elif kind == 1:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 2:
        data[at : at + 8] = struct.pack("<Q", rng.choice(HUGE))
    elif kind == 3:
        del data[rng.randrange(len(data)) :]
    else:
        del data[at : at + rng.randint(1, 40)]
    return bytes(data)


def test_the_file_is_valid_before_damage(valid: bytes, tmp_path: Path) -> None:
    path = tmp_path / "valid.gguf"
    path.write_bytes(valid)
    load_all(path)


def test_damage_is_reported_and_bounded(valid: bytes, tmp_path: Path) -> None:
    rng = random.Random(20240917)
    path = tmp_path / "damaged.gguf"
    refused = 0
    tracemalloc.start()
    try:
        for i in range(MUTATIONS):
            # A new file each time: truncating one that is still mapped would be a bus error.
            path.unlink(missing_ok=True)
            path.write_bytes(damage(valid, rng))
            tracemalloc.reset_peak()
            began = time.perf_counter()
            try:
                load_all(path)
            except CheckpointError as e:
                refused += 1
                assert "damaged.gguf" in str(e)
            assert time.perf_counter() - began < MAX_SECONDS, f"mutation {i}"
            assert tracemalloc.get_traced_memory()[1] < MAX_BYTES, f"mutation {i}"
    finally:
        tracemalloc.stop()
    assert refused > MUTATIONS // 2  # else the damage misses what matters


def metadata_keys(file: GGUFFile) -> list[str]:
    """Those of the file, and all that the readers ask for."""
    config = (PACKAGE / "load" / "gguf_config.py").read_text()
    vocab = (PACKAGE / "text" / "gguf_vocab.py").read_text()
    read = r'\b(?:count|number|text|flag|numbers|token_id)\(\s*"([\w.]+)"'
    keys = [f"llama.{name}" for name in re.findall(read, config)]
    keys += [f"tokenizer.ggml.{name}" for name in re.findall(read, vocab)]
    return list(dict.fromkeys([*file.metadata, *keys]))


def test_hostile_metadata(valid: bytes, tmp_path: Path) -> None:
    """Red when a value of the wrong kind or size is anything but an error that names it."""
    path = tmp_path / "hostile.gguf"
    path.write_bytes(valid)
    file = GGUFFile.open(path)
    good, keys = dict(file.metadata), metadata_keys(file)
    assert {"llama.block_count", "llama.rope.freq_base", "tokenizer.ggml.scores"} <= {*keys}
    refused = 0
    tracemalloc.start()
    try:
        for key in keys:
            for value in hostile.VALUES:
                file.metadata.clear()
                file.metadata.update({**good, key: value})
                try:
                    checkpoint = GGUFCheckpoint(file)
                    check_fit(checkpoint, spec_of(checkpoint.config))
                    tokenizer_from_gguf(file.metadata, str(path))
                except QuireError as error:
                    refused += 1
                    assert len(str(error)) < 600
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
    assert refused > len(keys)


def test_a_count_of_layers_takes_no_memory(valid: bytes, tmp_path: Path) -> None:
    """Red when a list with an entry for each layer is made before the count is doubted."""
    path = tmp_path / "deep.gguf"
    path.write_bytes(valid)
    file = GGUFFile.open(path)
    renamed = {key.replace("llama.", "gemma2."): value for key, value in file.metadata.items()}
    file.metadata.clear()
    file.metadata.update({**renamed, "general.architecture": "gemma2", "gemma2.block_count": 10**7})
    tracemalloc.start()
    try:
        with pytest.raises(
            CheckpointError, match=r"block_count = 10000000: want .* from 1 to 4096"
        ):
            GGUFCheckpoint(file)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
