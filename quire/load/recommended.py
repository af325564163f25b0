"""How a model's makers want it sampled: what a server uses where a request says nothing.

From `generation_config.json` beside the weights, or from the registry for models that come without
one. Offline scripts are not affected: `SamplingParams` has defaults of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quire.errors import BadRequest, CheckpointError
from quire.jsonfile import read_object_if_any
from quire.load.known import find_known
from quire.params import SamplingParams

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def recommended_sampling(model: str, path: Path) -> dict[str, float]:
    """By name of a SamplingParams field; empty when nobody said so. Raises CheckpointError."""
    known = find_known(model)
    if known is not None and known.sampling:
        return dict(known.sampling)
    file = path / "generation_config.json"
    config = read_object_if_any(file) if path.is_dir() else {}
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
