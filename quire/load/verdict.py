"""open_verdict: what a model's classification head means, from its config.json alone. No torch."""

from __future__ import annotations

from quire.config import EngineArgs
from quire.jsonfile import read_object_if_any
from quire.load.hub import resolve_model
from quire.models.sequence_head import Verdict


def open_verdict(args: EngineArgs) -> Verdict | None:
    """None for a model that generates; a GGUF file always does."""
    path = resolve_model(args.model)
    return Verdict.of(read_object_if_any(path / "config.json")) if path.is_dir() else None
