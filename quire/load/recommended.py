"""How a model's makers want it sampled: used wherever a request says nothing.

From `generation_config.json` beside the weights, or from the registry for models that come without
one. `SamplingParams` has defaults of its own: a script that makes one gets those.
"""

from __future__ import annotations

from pathlib import Path

from quire.errors import BadRequest, NotSupported
from quire.jsonfile import read_object_if_any
from quire.load.known import find_known
from quire.params import SamplingParams

FILE = "generation_config.json"
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def chosen_sampling(generation_config: str | None, model: str, path: Path) -> dict[str, float]:
    """As vLLM's argument of that name says: "auto" asks the model, a folder has a file of its own,
    and "vllm", "none" or None leave SamplingParams as it is."""
    if generation_config is None or generation_config in ("none", "vllm"):
        return {}
    if generation_config == "auto":
        return recommended_sampling(model, path)
    folder = Path(generation_config)
    if not (folder / FILE).is_file():
        raise NotSupported(
            f"got generation_config={generation_config!r}, want 'auto', 'none' or a folder with"
            f" {FILE}"
        )
    return _read(folder)


def recommended_sampling(model: str, path: Path) -> dict[str, float]:
    """By name of a SamplingParams field; empty when nobody said anything."""
    known = find_known(model)
    if known is not None and known.sampling:
        return dict(known.sampling)
    return _read(path) if path.is_dir() else {}


def _read(folder: Path) -> dict[str, float]:
    config = read_object_if_any(folder / FILE)
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
