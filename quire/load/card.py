"""open_card: what a model's files look like from outside: form, size, age. No torch, no weights.

For listings of models. What the engine made of the files (layers, context, device) it tells by
itself; see `engine/commands.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from quire.config import EngineArgs
from quire.jsonfile import read_object_if_any
from quire.load.hub import resolve_model

SHORT = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class ModelCard:
    format: str  # "gguf" or "safetensors"
    storage: str  # how most of the weights are stored: "Q4_0", "BF16", ...
    num_bytes: int
    modified: datetime
    digest: str  # of the files' names, sizes and times: other files, another digest


def open_card(args: EngineArgs) -> ModelCard:
    """Raises CheckpointError for a damaged header; an absent config.json is none to it."""
    path = resolve_model(args.model)
    is_gguf = path.suffix == ".gguf"
    files = [path] if is_gguf else sorted(path.glob("*.safetensors"))
    stats = {file.name: file.stat() for file in files}
    times = [stat.st_mtime for stat in stats.values()] or [path.stat().st_mtime]
    told = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats.items()]
    return ModelCard(
        format="gguf" if is_gguf else "safetensors",
        storage=_gguf_storage(path) if is_gguf else _folder_storage(path),
        num_bytes=sum(stat.st_size for stat in stats.values()),
        modified=datetime.fromtimestamp(max(times), UTC),
        digest=sha256("\n".join(told).encode()).hexdigest(),
    )


def _gguf_storage(path: Path) -> str:
    from quire.load.gguf import GGUFFile

    sizes: Counter[str] = Counter()
    for tensor in GGUFFile.open(path).tensors.values():
        sizes[tensor.type.name] += tensor.num_bytes
    return sizes.most_common(1)[0][0] if sizes else ""


def _folder_storage(folder: Path) -> str:
    config = read_object_if_any(folder / "config.json")
    packed = config.get("quantization_config")
    if isinstance(packed, Mapping) and packed.get("quant_method"):
        return str(packed["quant_method"]).upper()
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return SHORT.get(stored, stored)
