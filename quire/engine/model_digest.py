"""model_digest: whether two machines have the same model, without reading its weights."""

from __future__ import annotations

import hashlib
import json

from quire.config import EngineArgs
from quire.load.open import open_model


def model_digest(args: EngineArgs) -> str:
    """Of its config and of the names and shapes of all tensors."""
    stored = open_model(args).checkpoint
    shapes = {name: stored.shape(name) for name in sorted(stored.names())}
    said = json.dumps([stored.config, shapes], sort_keys=True, default=repr)
    return hashlib.sha256(said.encode()).hexdigest()
