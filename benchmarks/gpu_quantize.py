"""How long `quire quantize` takes: random checkpoints of known shapes, written first, not timed.

    python -m benchmarks.gpu_quantize 1.5b:gptq 8b:rtn
    python -m benchmarks.gpu_quantize tiny:gptq --device cpu       # a tiny model, on any machine

Prints one JSON line a job: seconds of the whole command, from its start to its end. The disk of
`--scratch` counts: an 8B checkpoint is read and a fourth of it written. Calibration is the built-in
text, by a tokenizer in which nothing merges; its 64 sequences of 512 tokens are as long as ever.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu_served import write_tokenizer
from quire.bench.shapes import SHAPES, Config, shrunk, write_shape

QWEN_15B: Config = {
    **SHAPES["0.6b"],
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "head_dim": 128,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
}
TINY = {**shrunk(SHAPES["8b"]), "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
KNOWN: dict[str, Config] = {"1.5b": QWEN_15B, "8b": SHAPES["8b"], "tiny": TINY}


def shapes_of(config: Config, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of a layer of a Llama or a Qwen2."""
    width, ffn = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    prefix = f"model.layers.{layer}."
    for name, outputs in (("q", queries), ("k", keys), ("v", keys)):
        yield f"{prefix}self_attn.{name}_proj.weight", (outputs, width)
        if config["model_type"] == "qwen2":
            yield f"{prefix}self_attn.{name}_proj.bias", (outputs,)
    yield f"{prefix}self_attn.o_proj.weight", (width, queries)
    yield f"{prefix}mlp.gate_proj.weight", (ffn, width)
    yield f"{prefix}mlp.up_proj.weight", (ffn, width)
    yield f"{prefix}mlp.down_proj.weight", (width, ffn)
    yield f"{prefix}input_layernorm.weight", (width,)
    yield f"{prefix}post_attention_layernorm.weight", (width,)


def ends_of(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    vocab, width = config["vocab_size"], config["hidden_size"]
    yield "model.embed_tokens.weight", (vocab, width)
    yield "model.norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, width)


def write_checkpoint(config: Config, folder: Path, device: str) -> None:
    """A shard a layer, in bf16."""
    write_shape(config, folder)
    write_tokenizer(folder, int(config["vocab_size"]))
    generator = torch.Generator(device).manual_seed(0)

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        if "norm" in name:
            return torch.ones(shape, dtype=torch.bfloat16)
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return (values * shape[-1] ** -0.5).bfloat16().cpu()

    parts = [ends_of(config), *(shapes_of(config, i) for i in range(config["num_hidden_layers"]))]
    index: dict[str, str] = {}
    for number, part in enumerate(parts):
        tensors = {name: made(name, shape) for name, shape in part}
        file = f"model-{number:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def measure(job: str, device: str, scratch: Path) -> dict[str, Any]:
    shape, method = job.split(":")
    model, out = scratch / shape, scratch / f"{shape}-{method}"
    if not model.exists():
        write_checkpoint(KNOWN[shape], model, device)
        os.sync()  # else the result's shards wait behind it for the disk
    words = [sys.executable, "-m", "quire", "quantize", str(model), "--method", method]
    words += ["--out", str(out), "--device", device, "--json", "--no-report"]
    if shape == "tiny":
        words += ["--group-size", "32", "--samples", "4", "--length", "64"]
    begun = time.perf_counter()
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - begun
    shutil.rmtree(out, ignore_errors=True)
    return {"what": "quantize", "job": job, "device": device, "exit": done.returncode,
            "seconds": round(seconds, 2)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("jobs", nargs="+", metavar="SHAPE:METHOD", help=", ".join(KNOWN))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scratch", type=Path, help="a folder; a temporary one otherwise")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        for job in args.jobs:
            print(json.dumps(measure(job, args.device, Path(scratch))), flush=True)


if __name__ == "__main__":
    main()
