"""GroupTiers: the tiers of ranks that hold a model together, as the first rank's policy sees them.

Every rank keeps its own share of each page in tiers of its own. A page counts as found only where
all ranks hold their shares: a request steps aside until each has said how many of its pages it
has in memory, and the fewest are loaded. Pages that a rank lacks are saved again when somebody has
computed them. What ranks lose, damage or have no room for is a miss for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.errors import RankLost
from quire.kv.tier_index import Buffer, Landing, Stored, Wanted
from quire.request import RequestId
from quire.tiers.tiers import Tiers

MAX_LACKING = 1 << 16  # keys that are remembered; a forgotten one costs a look in vain


class Answer(NamedTuple):
    number: int  # of what was asked
    num_held: int  # so many of the first nodes the rank holds for the request


class Others(Protocol):
    """The tiers of the other ranks. Raises RankLost."""

    def fetch(self, number: int, owner: RequestId, wanted: Sequence[Wanted]) -> None:
        """Each holds as many of the first of these in memory as it can until `let_go`, and answers
        once."""
        ...

    def let_go(self, owner: RequestId) -> None: ...

    def answers(self) -> Sequence[Answer]:
        """Those that have come; never waits."""
        ...


@dataclass(slots=True)
class _Ask:
    """What all ranks were asked to hold for a request."""

    wanted: Sequence[Wanted]
    num_left: int  # answers that have not come
    num_held: int  # the fewest that a rank holds
    until: float  # when those that did not answer have nothing


class GroupTiers:
    """`TierIndex` and `PageStore` of the first rank."""

    def __init__(
        self,
        own: Tiers,
        others: Others,
        num_others: int,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`patience_s`: how long a request waits for an answer."""
        self.own, self._others, self._num_others = own, others, num_others
        self._patience_s, self._clock = patience_s, clock
        self._num_asked = 0
        self._unanswered: dict[int, _Ask] = {}
        self._asks: dict[RequestId, _Ask] = {}  # for requests that wait
        self._granted: dict[RequestId, frozenset[bytes]] = {}  # what all hold for those
        self._lacking: set[bytes] = set()  # keys of nodes that we have, and another rank has not

    # ------------------------------------------------------------ as TierIndex

    def has(self, key: bytes) -> bool:
        return key not in self._lacking and self.own.has(key)

    def fetch(self, owner: RequestId, wanted: Sequence[Wanted], source: str) -> bool:
        """The first rank alone decides what is worth reading."""
        if not self.own.fetch(owner, wanted, source):
            wanted = wanted[: len(self.own.memory.pinned(owner, wanted))]
        if not wanted:
            return False
        self._num_asked += 1
        until = self._clock() + self._patience_s
        ask = _Ask(wanted, self._num_others, len(wanted), until)
        try:
            self._others.fetch(self._num_asked, owner, wanted)
        except RankLost:  # the next step says so
            return False
        self._unanswered[self._num_asked] = self._asks[owner] = ask
        return True

    def is_bringing(self, owner: RequestId) -> bool:
        ask = self._asks.get(owner)
        if ask is None:
            return False
        self._hear()
        is_late = self._clock() > ask.until
        if self.own.is_bringing(owner) or (ask.num_left and not is_late):
            return True
        del self._asks[owner]
        self._granted[owner] = frozenset(
            node.key for node in ask.wanted[: self._settle(ask, owner)]
        )
        return False

    def pin(self, owner: RequestId, wanted: Wanted) -> bool:
        return wanted.key in self._granted.get(owner, ()) and self.own.pin(owner, wanted)

    def let_go(self, owner: RequestId) -> None:
        is_waiting = self._asks.pop(owner, None) is not None
        if self._granted.pop(owner, None) is not None or is_waiting:
            with suppress(RankLost):  # the next step says so
                self._others.let_go(owner)
            self._hear()
        self.own.let_go(owner)

    def _hear(self) -> None:
        """Answers do not pile up: they are read whenever anything is asked or let go."""
        if not self._unanswered:
            return
        try:
            for number, num_held in self._others.answers():
                ask = self._unanswered[number]
                ask.num_left, ask.num_held = ask.num_left - 1, min(ask.num_held, num_held)
                if not ask.num_left:
                    del self._unanswered[number]
        except RankLost:  # the next step says so; nobody waits until then
            for ask in self._unanswered.values():
                ask.until = 0.0

    def _settle(self, ask: _Ask, owner: RequestId) -> int:
        """How many of the first nodes everybody holds."""
        if ask.num_left:
            return 0
        count = min(ask.num_held, len(self.own.memory.pinned(owner, ask.wanted)))
        if len(self._lacking) > MAX_LACKING:
            self._lacking.clear()
        self._lacking.update(node.key for node in ask.wanted[count:])
        return count

    # ------------------------------------------------------------ as a PageStore

    def room(self) -> Buffer | None:
        return self.own.room()

    def put(self, node: Wanted, data: Buffer, landing: Landing | None = None) -> None:
        """Every rank does, in the same step."""
        self._lacking.discard(node.key)
        self.own.put(node, data, landing)

    def get(self, key: bytes) -> Stored:
        return self.own.get(key)
