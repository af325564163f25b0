"""ModelCard: a model's files seen from outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.config import EngineArgs
from quire.load.card import open_card


@pytest.mark.parametrize(
    ("config", "storage"),
    [
        ('{"torch_dtype": "bfloat16"}', "BF16"),
        ('{"dtype": "float16"}', "F16"),
        ("{}", "F32"),
        ('{"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}', "MXFP4"),
    ],
)
def test_a_folder(tmp_path: Path, config: str, storage: str) -> None:
    """Red when a listing shows another size or form than the folder has."""
    (tmp_path / "config.json").write_text(config)
    for number, name in enumerate(("a.safetensors", "b.safetensors"), 1):
        (tmp_path / name).write_bytes(b"x" * 10 * number)
        os.utime(tmp_path / name, (number, number))
    card = open_card(EngineArgs(model=str(tmp_path)))
    assert (card.format, card.storage, card.num_bytes) == ("safetensors", storage, 30)
    assert card.modified.timestamp() == 2


def test_a_gguf_file(tmp_path: Path) -> None:
    """Red when the few plain tensors of a quantised file decide what it is called."""
    import gguf
    import numpy as np

    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("norm", np.ones(32, np.float32))
    rows = gguf.quants.quantize(np.ones((64, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("w", rows, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    card = open_card(EngineArgs(model=str(path)))
    assert (card.format, card.storage) == ("gguf", "Q8_0")
    assert card.num_bytes == path.stat().st_size


def test_other_files_have_another_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    first = open_card(EngineArgs(model=str(tmp_path))).digest
    assert open_card(EngineArgs(model=str(tmp_path))).digest == first
    (tmp_path / "model.safetensors").write_bytes(b"xy")
    assert open_card(EngineArgs(model=str(tmp_path))).digest != first
