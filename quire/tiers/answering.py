"""AnsweringTiers: the tiers of a rank behind the first. They do what they are asked and say what
came of it: how many nodes of a chain are in memory now, and stay there until they are let go.

Every question is answered once, by the thread that asks or by the one that reads the disk. Whether
pages are worth reading is the first rank's to decide (`group_tiers.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.kv.tier_index import Wanted
from quire.request import RequestId
from quire.tiers.group_tiers import Answer
from quire.tiers.tiers import Tiers


class _Asked(NamedTuple):
    number: int
    wanted: Sequence[Wanted]


class AnsweringTiers:
    def __init__(self, own: Tiers, answer: Callable[[Answer], None]) -> None:
        """`answer` may be called by several threads."""
        self.own, self._answer = own, answer
        self._asked: dict[RequestId, _Asked] = {}
        self._lock = threading.Lock()
        own.on_brought = self._brought

    def fetch(self, number: int, owner: RequestId, wanted: Sequence[Wanted]) -> None:
        with self._lock:
            assert owner not in self._asked, "a request asks again when it was let go"
            self._asked[owner] = _Asked(number, wanted)
        if not self.own.fetch(owner, wanted, ""):
            self._brought(owner)

    def let_go(self, owner: RequestId) -> None:
        with self._lock:
            asked = self._asked.pop(owner, None)
        self.own.let_go(owner)
        if asked is not None:
            self._answer(Answer(asked.number, 0))

    def _brought(self, owner: RequestId) -> None:
        """Nothing more comes for this request: what is here counts."""
        with self._lock:
            asked = self._asked.pop(owner, None)
        if asked is not None:
            count = len(self.own.memory.pinned(owner, asked.wanted))
            self._answer(Answer(asked.number, count))
