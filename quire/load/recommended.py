"""How a model's makers want it sampled: used wherever a request says nothing.

From `generation_config.json` beside the weights, or from the registry for models that come without
one. `SamplingParams` has defaults of its own: a script that makes one gets those.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quire.errors import BadRequest, CheckpointError, NotSupported
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
    return _read(folder / FILE)


def recommended_sampling(model: str, path: Path) -> dict[str, float]:
    """By name of a SamplingParams field; empty when nobody said so. Raises CheckpointError."""
    known = find_known(model)
    if known is not None and known.sampling:
        return dict(known.sampling)
    return _read(path / FILE) if path.is_dir() else {}


def _read(file: Path) -> dict[str, float]:
    config = read_object_if_any(file)
    if config.get("do_sample") is False:
        return {}
    found = {name: config[name] for name in FIELDS if config.get(name) is not None}
    _check(found, file)
    return found


def _check(values: Mapping[str, object], file: Path) -> None:
    """Nonsense is named at the start: in requests it would be nobody's fault."""
    bad = [f"got {name}={value}, want a number" for name, value in values.items() if value is True]
    try:
        SamplingParams().with_(**values)
    except BadRequest as error:
        bad.append(str(error))
    if bad:
        raise CheckpointError(
            f"{file}: {bad[0]}; correct the file, or serve with --generation-config none"
        )
