"""A GGUF file as a Hugging Face folder, so that other engines can read the same weights.

    python -m quire.bench.cpu.hf_export model.gguf folder

Weights are decoded to fp32 once: whoever reads the folder computes with exactly our numbers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def export(source: Path, folder: Path) -> Path:
    """Writes config.json, model.safetensors and the tokenizer; does nothing if they are there."""
    from safetensors.torch import save_file

    from quire.config import EngineArgs
    from quire.load.open import open_model

    if (folder / "model.safetensors").is_file():
        return folder
    opened = open_model(EngineArgs(model=str(source)))
    checkpoint, tokenizer = opened.checkpoint, opened.tokenizer
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: checkpoint.read(name).float().contiguous().clone() for name in checkpoint.names()
    }
    config = {**checkpoint.config, "torch_dtype": "float32", "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if tokenizer is not None:
        tokenizer._backend.save(str(folder / "tokenizer.json"))
        words = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "chat_template": tokenizer.chat_template,
        }
        text = json.dumps({key: value for key, value in words.items() if value is not None})
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})  # last: marks done
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(export(args.source, args.folder))


if __name__ == "__main__":
    main()
