"""How a model's makers want it sampled: what a server uses where a request says nothing.

From `generation_config.json` beside the weights, or from the registry for models that come without
one. Offline scripts are not affected: `SamplingParams` has defaults of its own.
"""

from __future__ import annotations

from pathlib import Path

from quire.errors import BadRequest
from quire.jsonfile import read_object_if_any
from quire.load.known import find_known
from quire.params import SamplingParams

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def recommended_sampling(model: str, path: Path) -> dict[str, float]:
    """By name of a SamplingParams field; empty when nobody said anything."""
    known = find_known(model)
    if known is not None and known.sampling:
        return dict(known.sampling)
    config = read_object_if_any(path / "generation_config.json") if path.is_dir() else {}
    if config.get("do_sample") is False:
        return {}
    found = {
        name: value
        for name in FIELDS
        if isinstance(value := config.get(name), (int, float)) and not isinstance(value, bool)
    }
    return found if _is_sane(found) else {}


def _is_sane(values: dict[str, float]) -> bool:
    """A file's odd values must not make every request fail."""
    try:
        SamplingParams().with_(**values)
    except BadRequest:
        return False
    return True
