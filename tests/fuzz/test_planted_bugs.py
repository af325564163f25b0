"""The fuzz harness must catch bugs: plant the classic ones and see it turn red.

Each plant names one way paging goes wrong in practice; if the harness stops seeing it, the
harness is broken, whatever colour the other tests have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.kv import lookup
from quire.kv.allocator import PageAllocator
from quire.kv.manager import Holding, KVManager
from quire.kv.prefix import GONE, Node, PrefixTree
from quire.kv.transfers import Transfers
from quire.request import Request
from quire.sched import scheduler
from quire.sched.scheduler import Scheduler
from quire.step import Work
from tests import doubles
from tests.fuzz.test_workloads import run

Patch = pytest.MonkeyPatch


def no_refcount_on_hit(patch: Patch) -> None:
    def share(self: PageAllocator, page: int) -> None:
        if self.refs[page] == 0:
            del self._cached[page]
            self.refs[page] += 1

    patch.setattr(PageAllocator, "share", share)


def key_without_parent(patch: Patch) -> None:
    plain = PrefixTree.child_key
    patch.setattr(PrefixTree, "child_key", staticmethod(lambda parent, tokens: plain(b"", tokens)))


def leak_on_release(patch: Patch) -> None:
    def release(self: KVManager, request: Request) -> None:
        held = self._held.pop(request.id, None)
        for page in (held.pages() if held else [])[:-1]:
            self.allocator.drop(page)

    patch.setattr(KVManager, "release", release)


def unverified_pages_published(patch: Patch) -> None:
    plain = KVManager.commit

    def commit(self: KVManager, request: Request) -> None:
        plain(self, request)
        held = self._held[request.id]
        column = len(held.nodes)
        if column < min(map(len, held.tables)) and (column + 1) * self.page_size <= len(
            request.tokens
        ):
            self._publish(request, held, column)

    patch.setattr(KVManager, "commit", commit)


def no_copy_on_write(patch: Patch) -> None:
    patch.setattr(PageAllocator, "is_writable", lambda self, page: True)


def copy_forgotten(patch: Patch) -> None:
    def copy_page(
        self: KVManager, request: Request, held: Holding, group: int, column: int
    ) -> None:
        plain(self, request, held, group, column)
        self._copies.pop()

    plain = KVManager._copy_page
    patch.setattr(KVManager, "_copy_page", copy_page)


def preempted_stays_in_plan(patch: Patch) -> None:
    plain = Scheduler._preempt
    patch.setattr(Scheduler, "_preempt", lambda self, victim, works: plain(self, victim, {}))


def parents_first_in_lru(patch: Patch) -> None:
    def release(self: KVManager, request: Request) -> None:
        held = self._held.pop(request.id, None)
        for page in held.pages() if held else []:
            self.allocator.drop(page)

    patch.setattr(KVManager, "release", release)


def evicted_node_stays(patch: Patch) -> None:
    patch.setattr(PrefixTree, "evict", lambda self, node, page: [])


def full_hit_leaves_no_query(patch: Patch) -> None:
    plain = KVManager.match

    def match(self: KVManager, request: Request) -> int:
        plain(self, request)
        return len(self._held[request.id].nodes) * self.page_size

    patch.setattr(KVManager, "match", match)


def table_write_lost(patch: Patch) -> None:
    plain = KVManager.take_edits

    def take_edits(self: KVManager) -> object:
        writes, copies = plain(self)
        return writes[:-1], copies

    patch.setattr(KVManager, "take_edits", take_edits)


def window_moves_too_far(patch: Patch) -> None:
    plain = KVManager._move_window

    def move(self: KVManager, request: Request, group: int, first: int) -> None:
        table = self._held[request.id].tables[group]
        plain(self, request, group, min(first + 1, len(table) - 1))

    patch.setattr(KVManager, "_move_window", move)


def window_stays(patch: Patch) -> None:
    patch.setattr(KVManager, "_move_window", lambda self, request, group, first: None)


def hit_without_its_window(patch: Patch) -> None:
    def longest(path: list[Node], windows: object, size: int) -> int:
        held = [i for i, node in enumerate(path, 1) if GONE not in node.pages]
        return held[-1] if held else 0

    patch.setattr(lookup, "longest_hit", longest)


def fork_from_a_moved_window(patch: Patch) -> None:
    patch.setattr(KVManager, "_can_fork", lambda self, parent, source: True)


def window_pages_outlive_their_node(patch: Patch) -> None:
    plain = PrefixTree.evict

    def evict(self: PrefixTree, node: Node, page: int) -> object:
        plain(self, node, page)
        return ()

    patch.setattr(PrefixTree, "evict", evict)


def writes_to_the_first_group(patch: Patch) -> None:
    plain = KVManager.take_edits

    def take_edits(self: KVManager) -> object:
        writes, copies = plain(self)
        return tuple(write._replace(group=0) for write in writes), copies

    patch.setattr(KVManager, "take_edits", take_edits)


def windowed_groups_take_whole_prompts(patch: Patch) -> None:
    plain = KVManager.reserve

    def reserve(self: KVManager, request: Request, start: int, upto: int, ahead: int = 0) -> bool:
        return plain(self, request, start, max(upto, ahead))

    patch.setattr(KVManager, "reserve", reserve)


def gaps_stay(patch: Patch) -> None:
    plain = KVManager._merge

    def merge(
        self: KVManager, request: Request, held: Holding, node: Node, group: int, column: int
    ) -> None:
        if node.pages[group] != GONE:
            plain(self, request, held, node, group, column)

    patch.setattr(KVManager, "_merge", merge)


def rejected_drafts_counted(patch: Patch) -> None:
    """The next step's slots lie behind the drafts that were refused."""
    plain = Scheduler._verify

    def verify(self: Scheduler, request: Request, work: Work, tokens: object, now: float) -> object:
        request.num_computed += work.num_drafts - (len(tokens) - 1)
        return plain(self, request, work, tokens, now)

    patch.setattr(Scheduler, "_verify", verify)


def drafts_published(patch: Patch) -> None:
    """A page that drafts filled goes to the prefix tree before they are verified."""
    plain = Scheduler._add_drafts

    def add_drafts(self: Scheduler, drafts: Any, budget: int, works: dict[int, Work]) -> int:
        left = plain(self, drafts, budget, works)
        for work in works.values():
            request = self.running[work.request_id]
            held = self.kv._held[request.id]
            column, size = len(held.nodes), self.kv.page_size
            if work.drafts and (column + 1) * size <= work.start + work.num_tokens:
                request.tokens.extend(work.drafts)
                self.kv._publish(request, held, column)
                del request.tokens[work.start + 1 :]
        return left

    patch.setattr(Scheduler, "_add_drafts", add_drafts)


def draws_behind_an_error_kept(patch: Patch) -> None:
    patch.setattr(doubles, "verified", lambda drawn, drafts: drawn)


def drafts_on_reserved_pages_only(patch: Patch) -> None:
    plain = Scheduler._add_drafts

    def add_drafts(self: Scheduler, drafts: Any, budget: int, works: dict[int, Work]) -> int:
        patch.setattr(KVManager, "reserve", lambda *args: True)
        left = plain(self, drafts, budget, works)
        patch.setattr(KVManager, "reserve", reserve)
        return left

    reserve = KVManager.reserve
    patch.setattr(Scheduler, "_add_drafts", add_drafts)


def end_inside_a_run_missed(patch: Patch) -> None:
    patch.setattr(scheduler, "up_to_finish", lambda request, tokens, most: tokens)


def planned_past_drafts_in_flight(patch: Patch) -> None:
    plain = Scheduler._add_drafts

    def add_drafts(self: Scheduler, drafts: Any, budget: int, works: dict[int, Work]) -> int:
        before = {id: self.running[id].num_inflight for id in works}
        left = plain(self, drafts, budget, works)
        for id, count in before.items():
            self.running[id].num_inflight = count
        return left

    patch.setattr(Scheduler, "_add_drafts", add_drafts)


def loads_forgotten(patch: Patch) -> None:
    plain = Transfers.take
    patch.setattr(Transfers, "take", lambda self: (plain(self)[0], ()))


def pages_saved_too_late(patch: Patch) -> None:
    """A page is copied out a step later, when somebody else may have written it."""
    plain, late = Transfers.take, dict[int, Any]()

    def take(self: Transfers) -> Any:
        saves, loads = plain(self)
        before, late[id(self)] = late.get(id(self), ()), saves
        return before, loads

    patch.setattr(Transfers, "take", take)


def pins_outlive_requests(patch: Patch) -> None:
    patch.setattr(Transfers, "let_go", lambda self, request: None)


def loaded_window_is_short(patch: Patch) -> None:
    plain = Transfers.load

    def load(self: Transfers, held: Holding, ahead: list[Node], allocator: PageAllocator) -> bool:
        done = plain(self, held, ahead, allocator)
        del self._loads[:1]
        return done

    patch.setattr(Transfers, "load", load)


TIER_PLANTS = [
    loads_forgotten,
    pages_saved_too_late,
    pins_outlive_requests,
    loaded_window_is_short,
]
DRAFT_PLANTS = [
    rejected_drafts_counted,
    drafts_published,
    draws_behind_an_error_kept,
    drafts_on_reserved_pages_only,
    end_inside_a_run_missed,
    planned_past_drafts_in_flight,
]
GROUP_PLANTS = [
    window_moves_too_far,
    window_stays,
    hit_without_its_window,
    fork_from_a_moved_window,
    window_pages_outlive_their_node,
    writes_to_the_first_group,
    windowed_groups_take_whole_prompts,
    gaps_stay,
]
PLANTS = [
    no_refcount_on_hit,
    key_without_parent,
    leak_on_release,
    unverified_pages_published,
    no_copy_on_write,
    copy_forgotten,
    preempted_stays_in_plan,
    parents_first_in_lru,
    evicted_node_stays,
    full_hit_leaves_no_query,
    table_write_lost,
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bug_is_caught(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        for seed in range(120):
            run(seed, overlap=seed % 2 == 1)


@pytest.mark.parametrize("plant", GROUP_PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bug_in_groups_is_caught(
    plant: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        for seed in range(60):
            windows = ((None, 5), (None, 9, 24), (7,))[seed % 3]
            run(seed, overlap=seed % 2 == 1, windows=windows)


@pytest.mark.parametrize("plant", DRAFT_PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bug_in_drafts_is_caught(
    plant: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        for seed in range(60):
            run(seed, overlap=seed % 2 == 1, speculates=True)


@pytest.mark.parametrize("plant", TIER_PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bug_in_tiers_is_caught(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        for seed in range(60):
            windows = ((None,), (None, 5))[seed % 2]
            run(seed, overlap=seed % 4 > 1, windows=windows, has_tiers=True)
