"""Holding: the pages of one running request. CacheCounts: totals over all requests.

Only `manager.py` changes these records; `check.py` says what must be true of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.kv.prefix import Node


@dataclass(slots=True)
class Holding:
    """What one running request holds: its page tables, and the nodes of its published pages."""

    tables: list[list[int]]  # by group: a page for each column, GONE where it was given back
    firsts: list[int]  # by group: the first column that is held
    nodes: list[Node] = field(default_factory=list)
    ahead: list[Node] = field(default_factory=list)  # of the next columns, not in the tree yet
    num_ready: int = 0  # positions from the last reserve's start up to here are writable
    next_edge: int = 0  # computed tokens at which `commit` has something to do again
    num_loaded: int = 0  # columns that were loaded and not published yet

    def pages(self) -> list[int]:
        """All pages that are held, the shallowest first."""
        if len(self.tables) == 1:
            return self.tables[0][self.firsts[0] :]
        columns = max(map(len, self.tables))
        return [
            table[column]
            for column in range(min(self.firsts), columns)
            for table, first in zip(self.tables, self.firsts, strict=True)
            if first <= column < len(table)
        ]


@dataclass(slots=True)
class CacheCounts:
    """Totals since start, for stats."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    copied_pages: int = 0
    shared_pages: int = 0  # own copies given back because the tree had the content already
    window_pages: int = 0  # given back because the window had moved on
    loaded_tokens: int = 0  # of hit_tokens, those that were loaded from another place
