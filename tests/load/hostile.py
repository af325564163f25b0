"""What a stranger may write into a config.json, and every field that is read from one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from quire.models.spec import ROPE_KINDS
from tests.rules.source import PACKAGE


def _deep(depth: int) -> Any:
    value: Any = 5
    for _ in range(depth):
        value = [value]
    return value


VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 10**9, 10**12, 10**30, 10**400, True, False, None),
    *(1.5, -0.5, 1e-300, 1e300, math.nan, math.inf, -math.inf),
    *("x", "", "y" * 100_000, [], [1], [None], [True], [math.nan], [["x"]], _deep(300)),
    *({}, {"a": 1}, {"content": {}}),
)

# `config.count("head_dim")`, `config.values.get("layer_types")`, `_if_any(rope, "mscale")`, ...
_READ = re.compile(
    r"\b(?:count|number|numbers|flag|expect|nested|ids|has|get|_if_any)\(\s*(?:\w+, )?\"(\w+)\""
)


def fields() -> tuple[str, ...]:
    """By the source of the families, so that a new field is tried from its first day."""
    files = [*(PACKAGE / "models").glob("*.py"), PACKAGE / "load" / "ternary.py"]
    return tuple(sorted({name for file in files for name in _READ.findall(file.read_text())}))


def changed(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The config with one field after the other replaced by one value after the other."""
    inner = config.get("text_config")
    for key in dict.fromkeys([*config, *fields()]):
        for value in VALUES:
            yield {**config, key: value}
            if inner is not None:
                yield {**config, "text_config": {**inner, key: value}}


def turned(config: Mapping[str, Any], half_head: int) -> Iterator[dict[str, Any]]:
    """The same for every kind of rotary embedding."""
    for kind in ROPE_KINDS:
        rope: dict[str, Any] = {"rope_type": kind, "factor": 2.0}
        if kind == "longrope":
            rope |= {"short_factor": [1.0] * half_head, "long_factor": [2.0] * half_head}
        if kind == "freq_factors":
            rope |= {"factors": [1.5] * half_head}
        for key in (*ROPE_FIELDS, *rope):
            for value in VALUES:
                yield {**config, "rope_parameters": {**rope, key: value}}


ROPE_FIELDS = (
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    *("partial_rotary_factor", "original_max_position_embeddings"),
)
