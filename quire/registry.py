"""Registry: name -> "module:attribute", imported when asked for, with did-you-mean."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from typing import Any

from quire.errors import NotSupported


@dataclass(frozen=True, slots=True)
class Registry:
    kind: str  # what the names stand for, for messages
    entries: dict[str, str]

    def check(self, name: str) -> None:
        """Raises NotSupported for a name nobody knows; imports nothing."""
        if name not in self.entries:
            near = difflib.get_close_matches(name, self.entries, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise NotSupported(
                f"unknown {self.kind} {name!r}{hint} Known: {', '.join(sorted(self.entries))}"
            )

    def get(self, name: str) -> Any:
        self.check(name)
        module, _, attribute = self.entries[name].partition(":")
        loaded = importlib.import_module(module)
        return getattr(loaded, attribute) if attribute else loaded
