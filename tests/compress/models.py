"""Tiny models for the tests of compression, and what blocks make of a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.compress.beside import Beside
from quire.compress.calibration import BUILT_IN, Calibration
from quire.compress.passes.recipe import Recipe
from quire.compress.pipeline import Job, compress
from quire.compress.source import Source
from quire.compress.stream import Stream
from quire.load.checkpoint import Checkpoint
from quire.models.tiny import tiny_model

CPU = torch.device("cpu")
# Widths that every layout has room for.
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def small(folder: Path, family: str = "llama", **changes: object) -> Path:
    return tiny_model(family, folder / "model", **{**WIDE, **changes})


def job(model: Path, out: Path, method: str, **changes: object) -> Job:
    fields = {"group": 32} if method in ("rtn", "gptq", "awq", "codebook") else {}
    keep = changes.pop("keep", () if method == "gguf" else ("lm_head",))
    recipe = Recipe(method, **{**fields, **changes})  # type: ignore[arg-type]
    text = model.parent / "calibration.txt"
    text.write_text(BUILT_IN.read_text(encoding="utf-8")[:400], encoding="utf-8")
    return Job(str(model), out, recipe, Calibration(6, 32, text), keep, CPU)  # type: ignore[arg-type]


def run(model: Path, out: Path, method: str, **changes: object) -> dict[str, object]:
    return compress(job(model, out, method, **changes), lambda progress: None)


def canned(self: Beside, work: Any, say: Callable[[str], None]) -> dict[str, Any]:
    """As `judge` returns it, of numbers that are quick to have."""
    pair = {"value": 1.0, "error": None}
    row = {
        "name": self.out.name,
        "perplexity": pair,
        "bits_per_byte": 1.0,
        "tasks": {},
        "size": {"weight_bytes": 1.0, "disk_bytes": 1.0, "peak_bytes": 1.0},
        "decode_tok_s": 1.0,
    }
    text = {"name": "canned", "windows": 1, "window": 64}
    return {"rows": [row], "against": None, "text": text, "meaning": [f"of {self.model}"]}


@torch.inference_mode()
def hidden(
    model: Path, checkpoint: Checkpoint | None = None, text: Calibration | None = None
) -> Tensor:
    """What all blocks make of a text or 3 random sequences of 16 tokens, [tokens, hidden]; of a
    checkpoint of that model, or of its own weights."""
    source = Source.open(str(model))
    ids = torch.randint(0, source.spec.vocab_size, (3, 16), generator=torch.Generator())
    if text is not None:
        assert source.tokenizer is not None
        ids = text.sequences(source.tokenizer)
    stream = Stream(source.spec, ids, CPU)
    outer = {source.places[name].target.name: name for name in source.of_layer(None)}
    positions = outer.get("positions.weight")
    stream.enter(
        source.read(outer["embed.weight"]).float(),
        None if positions is None else source.read(positions).float(),
    )
    for layer in range(source.spec.num_layers):
        stream.load(layer, checkpoint or source.checkpoint, source.names)
        stream.advance(layer)
    (part,) = stream._parts
    return part.x if part.residual is None else part.x + part.residual
