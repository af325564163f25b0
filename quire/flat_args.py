"""EngineArgs from arguments as users say them: one flat list of names, vLLM's where it has one.

What concerns ranks is a record of its own inside `EngineArgs`; here its names stand beside all
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quire.config import EngineArgs, Parallel

RECORD = "parallel"
_INNER = frozenset(field.name for field in fields(Parallel))


def arg_names() -> set[str]:
    """Everything that may be said."""
    return {field.name for field in fields(EngineArgs)} - {RECORD} | _INNER


def args_of(values: Mapping[str, Any]) -> EngineArgs:
    """Raises TypeError for a name that there is not."""
    inner = {name: value for name, value in values.items() if name in _INNER}
    outer = {name: value for name, value in values.items() if name not in _INNER}
    return EngineArgs(**outer, parallel=Parallel(**inner))
