"""Heads that come with Quire: drafters for models known by name, distilled from their answers.

`quire distill` made them, and `drafters/` holds them, in the layout of any other head. They are
used where `speculative_config` names a method and no model.
"""

from __future__ import annotations

from pathlib import Path

from quire.errors import NotSupported
from quire.load.known import find_known

FOLDER = Path(__file__).parents[1] / "drafters"


def shipped_head(method: str, target: str) -> str:
    """The folder of the head for this method and model. Raises NotSupported."""
    known = find_known(target)
    folder = FOLDER / f"{known.name if known else 'none'}-{method}"
    if not folder.is_dir():
        there = ", ".join(sorted(path.name for path in FOLDER.glob(f"*-{method}")))
        raise NotSupported(
            f"speculative_config with method {method!r} needs a model for {target!r}; Quire comes"
            f" with {there or 'none of that kind'}. Name one, or make one with quire distill"
        )
    return str(folder)
