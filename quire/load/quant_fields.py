"""Fields that quantisation configs have in common, checked."""

from __future__ import annotations

import re

from quire.errors import CheckpointError, NotSupported, shown
from quire.models.spec import Config


def bits_of(config: Config, known: tuple[int, ...]) -> int:
    bits = config.count("bits")
    if bits not in known:
        raise NotSupported(
            f"config.json: got bits={bits}, of which only {', '.join(map(str, known))} are read"
        )
    return bits


def group_size_of(config: Config) -> int | None:
    """None where it says -1: one group."""
    return None if config.values.get("group_size") == -1 else config.count("group_size", 128)


def pattern(text: str) -> re.Pattern[str]:
    """Raises CheckpointError."""
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"config.json: got {shown(text)}, want a regular expression: {error}"
        ) from None
