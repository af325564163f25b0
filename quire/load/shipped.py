"""Heads that come with Quire: drafters for models known by name, distilled from their answers.

`quire distill` made them, and `drafters/` holds them, in the layout of any other head. They are
used where `speculative_config` names a method and no model.
"""

from __future__ import annotations

from pathlib import Path

from quire.errors import NotSupported
from quire.load.known import KNOWN_MODELS, KnownModel, WheelSource, find_known

FOLDER = Path(__file__).parents[1] / "drafters"


def shipped_head(method: str, target: str) -> str:
    """The folder of the head for this method and model. Raises NotSupported."""
    known = find_known(target) or _by_file(Path(target).name)
    folder = FOLDER / f"{known.name if known else ''}-{method}"
    if not folder.is_dir():
        there = ", ".join(sorted(path.name for path in FOLDER.glob(f"*-{method}")))
        raise NotSupported(
            f"speculative_config with method {method!r} needs a model for {target!r}; Quire comes"
            f" with {there or 'none of that kind'}. Name one, or make one with quire distill"
        )
    return str(folder)


def _by_file(name: str) -> KnownModel | None:
    """A model that was fetched under this name; a server knows its model by the file's path."""
    for model in KNOWN_MODELS:
        if isinstance(model.source, WheelSource) and model.source.filename == name:
            return model
    return None
