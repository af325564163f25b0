"""Tiers of several ranks without an engine: who is asked, who answers, and what counts as found."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.errors import RankLost
from quire.kv.tier_index import Wanted
from quire.request import RequestId
from quire.tiers.answering import AnsweringTiers
from quire.tiers.group_tiers import Answer, GroupTiers
from quire.tiers.memory import MemoryShelf
from quire.tiers.tempo import Tempo
from quire.tiers.tiers import Tiers
from tests.tiers.nodes import DATA_BYTES, data_of, node, open_shelf

ONE, TWO = RequestId(1), RequestId(2)
NODES = [node(i) for i in range(8)]


class Local:
    """Other ranks in this process; answers may be held back."""

    def __init__(self, ranks: Sequence[Tiers]) -> None:
        self.said: list[Answer] = []
        self.ranks = [AnsweringTiers(tiers, self.said.append) for tiers in ranks]
        self.is_silent = self.is_lost = False

    def fetch(self, number: int, owner: RequestId, wanted: Sequence[Wanted]) -> None:
        self._check()
        for rank in self.ranks:
            rank.fetch(number, owner, wanted)

    def let_go(self, owner: RequestId) -> None:
        self._check()
        for rank in self.ranks:
            rank.let_go(owner)

    def answers(self) -> list[Answer]:
        self._check()
        if self.is_silent:
            return []
        taken = list(self.said)
        del self.said[: len(taken)]
        return taken

    def _check(self) -> None:
        if self.is_lost:
            raise RankLost("gone")


def in_memory(count: int) -> Tiers:
    tiers = Tiers(MemoryShelf(1 << 20), None, Tempo(), DATA_BYTES)
    for number in range(count):
        tiers.put(NODES[number], data_of(number))
    return tiers


def on_disk(folder: Path, count: int) -> Tiers:
    tiers = Tiers(MemoryShelf(0), open_shelf(folder), Tempo(), DATA_BYTES)
    for number in range(count):
        tiers.put(NODES[number], data_of(number))
    assert tiers.flush(5.0)
    return tiers


def group_of(*ranks: Tiers) -> tuple[GroupTiers, Local]:
    others = Local(ranks[1:])
    return GroupTiers(ranks[0], others, len(ranks) - 1, patience_s=30.0), others


def await_all(group: GroupTiers, ranks: Sequence[Tiers], owner: RequestId) -> None:
    for tiers in ranks:
        assert tiers._reader.wait(5.0)
    assert not group.is_bringing(owner)


def granted(group: GroupTiers, owner: RequestId) -> int:
    return [group.pin(owner, one) for one in NODES].count(True)


def test_the_fewest_count(tmp_path: Path) -> None:
    """Red when a page counts that a rank has not, or what a rank lacks is never saved again."""
    ranks = in_memory(8), on_disk(tmp_path / "a", 5), on_disk(tmp_path / "b", 7)
    group, _ = group_of(*ranks)
    assert all(group.has(one.key) for one in NODES)
    assert granted(group, ONE) == 0, "nobody was asked"
    assert group.fetch(ONE, NODES, "")
    await_all(group, ranks, ONE)
    assert granted(group, ONE) == 5
    assert [group.has(one.key) for one in NODES] == [True] * 5 + [False] * 3
    assert [len(tiers.memory) for tiers in ranks] == [8, 5, 7], "pinned until they are let go"
    for number in range(5, 8):  # computed, and saved by all
        group.put(NODES[number], data_of(number))
        for tiers in ranks[1:]:
            tiers.put(NODES[number], data_of(number))
    group.let_go(ONE)
    assert all(tiers.flush(5.0) for tiers in ranks)
    assert [len(tiers.memory) for tiers in ranks] == [8, 0, 0] and granted(group, ONE) == 0
    assert group.fetch(TWO, NODES, "")
    await_all(group, ranks, TWO)
    assert granted(group, TWO) == 8
    group.let_go(TWO)
    for tiers in ranks:
        tiers.close()


def test_a_request_that_leaves_is_answered_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when an answer for a request that left is taken for that of the same request's next
    try, or one too many or too few comes."""
    ranks = in_memory(8), on_disk(tmp_path, 8)
    group, others = group_of(*ranks)
    reached, go_on = threading.Event(), threading.Event()
    assert ranks[1].disk is not None
    plain = ranks[1].disk.read

    def slow(one: Wanted, *room: object) -> bytearray | memoryview | None:
        reached.set()
        assert go_on.wait(5.0)
        return plain(one, *room)

    monkeypatch.setattr(ranks[1].disk, "read", slow)
    assert group.fetch(ONE, NODES, "") and reached.wait(5.0)
    assert group.is_bringing(ONE)
    group.let_go(ONE)
    assert not group.is_bringing(ONE) and not group._unanswered and not others.said
    assert group.fetch(ONE, NODES[:3], "")
    go_on.set()
    await_all(group, ranks, ONE)
    num_granted = granted(group, ONE)
    assert num_granted <= 3 and not group._unanswered and not others.said
    held = ranks[1].memory.pinned(ONE, NODES)
    assert len(held) >= num_granted
    group.let_go(ONE)
    assert len(ranks[1].memory) == 0 and ranks[1].memory._pinned == {}
    for tiers in ranks:
        tiers.close()


def test_nobody_waits_for_ever() -> None:
    """Red when a rank that hangs or is gone keeps a request beside the line."""
    now = 0.0
    ranks = in_memory(8), in_memory(8)
    others = Local(ranks[1:])
    group = GroupTiers(ranks[0], others, 1, patience_s=30.0, clock=lambda: now)
    others.is_silent = True
    assert group.fetch(ONE, NODES, "") and group.is_bringing(ONE)
    now = 31.0
    assert not group.is_bringing(ONE) and granted(group, ONE) == 0
    assert group.has(NODES[0].key), "nobody said that it is not there"
    others.is_silent = False
    group.let_go(ONE)
    assert not group._unanswered, "answers that come late are heard"
    assert group.fetch(TWO, NODES, "")
    others.is_lost = True
    assert not group.is_bringing(TWO) and granted(group, TWO) == 0
    group.let_go(TWO)
    assert not group.fetch(ONE, NODES, "")
    group.let_go(ONE)
    assert ranks[0].memory._pinned == {}


def test_what_the_first_rank_has_not_is_not_asked_for() -> None:
    """Red when a request waits for others in vain."""
    ranks = in_memory(0), in_memory(8)
    group, others = group_of(*ranks)
    assert not group.fetch(ONE, NODES, "") and not others.said
