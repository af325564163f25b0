"""Item: a JSON object inside a request, read key by key; what is wrong is named by its path.

For the loosely typed insides of bodies (conversation items, content blocks, tools), where a struct
per shape would refuse what clients really send. Whole bodies are structs; see `fields.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

from quire.errors import BadRequest


class Item:
    """One JSON object of a request, read key by key; what is wrong is named by its path."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise wrong(where, value, "an object")
        self.value: dict[str, Any] = value
        self.where = where

    def text(self, key: str) -> str:
        value = self.value.get(key)
        if not isinstance(value, str):
            raise wrong(f"{self.where}.{key}", value, "a string")
        return value

    def get(self, key: str) -> Any:
        return self.value.get(key)

    def only(self, known: Collection[str]) -> Item:
        """Refuse other keys: here they would change what is asked. Null and false ask nothing."""
        for key, value in self.value.items():
            if key not in known and value is not None and value is not False:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise BadRequest(
                    f"got {self.where}.{key[:60]}, which is not known here{hint};"
                    f" known: {', '.join(known)}",
                    param=f"{self.where}.{key[:60]}",
                )
        return self

    def items(self, key: str) -> list[Item]:
        """A list of objects; null is none."""
        value = self.value.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise wrong(f"{self.where}.{key}", value, "a list of objects")
        return [Item(one, f"{self.where}.{key}[{i}]") for i, one in enumerate(value)]


def wrong(where: str, value: object, want: str) -> BadRequest:
    shown = f"={value[:60]!r}" if isinstance(value, str) else f" of type {type(value).__name__}"
    return BadRequest(f"got {where}{shown}, want {want}", param=where)
