"""Snapshots against slow recomputation, on engines that really run."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from quire.config import SchedConfig
from quire.engine.core import EngineCore
from quire.engine.snapshot import MAX_LANES, MAX_WAITING, Snapshots
from quire.kv.manager import KVManager
from quire.kv.prefix import Node
from quire.obs.pool_picture import CACHED, FREE, MAX_CELLS, SHARED
from quire.obs.tree_picture import MAX_HEAD_TOKENS, MAX_SEGMENTS, SLICE, TreePicture
from quire.params import SamplingParams
from quire.request import Request
from quire.sched.scheduler import Scheduler
from quire.step import StepPlan, StepResult
from tests.doubles import VOCAB
from tests.unit.case import Case, Ready


class InstantRunner:
    """Answers every step at once with the same token."""

    last_plan = StepPlan()

    def execute(self, plan: StepPlan) -> Ready:
        self.last_plan = plan
        return Ready(StepResult([(5,) if work.sample else () for work in plan.works]))


def slow_states(kv: KVManager) -> list[int]:
    """The state of every page that can be handed out, one by one."""
    holders: dict[int, list[int]] = {}
    for id, pages in kv.holdings().items():
        for page in pages:
            holders.setdefault(page, []).append(id)
    states = []
    for page in range(1, kv.allocator.num_pages + 1):
        owners = holders.get(page, [])
        if owners:
            states.append(owners[0] if len(owners) == 1 else SHARED)
        else:
            states.append(CACHED if kv.allocator.is_cached(page) else FREE)
    return states


def slow_fold(kv: KVManager) -> Counter[tuple[int, int, int, int, int]]:
    """(page of the head, page of the parent's head, pages, hits, holders) of every segment."""
    children: dict[Node | None, list[Node]] = {}
    for node in kv.tree.nodes.values():
        children.setdefault(node.parent, []).append(node)
    found: Counter[tuple[int, int, int, int, int]] = Counter()
    todo = [(node, 0) for node in children.get(None, [])]
    while todo:
        head, above = todo.pop()
        last, pages = head, 1
        while len(below := children.get(last, [])) == 1 and below[0].num_hits == last.num_hits:
            last, pages = below[0], pages + 1
        refs = max(kv.allocator.refs[page] for page in head.pages)
        found[(head.number, above, pages, head.num_hits, refs)] += 1
        todo += [(node, head.number) for node in children.get(last, [])]
    return found


def fold_of(rows: list[dict[str, Any]]) -> Counter[tuple[int, int, int, int, int]]:
    return Counter((r["id"], r["parent"], r["pages"], r["hits"], r["live"]) for r in rows)


def assert_parents_come_first(rows: list[dict[str, Any]]) -> None:
    seen = {0}
    for row in rows:
        assert row["parent"] in seen
        assert row["id"] not in seen, "two segments with one id"
        seen.add(row["id"])


def random_step(case: Case, rng: random.Random) -> None:
    if rng.random() < 0.5 and len(case.scheduler.waiting) < 6:
        shared = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5][: rng.randint(0, 12)]
        prompt = shared + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        case.add(prompt, rng.randint(1, 12), n=rng.choice([1, 1, 3]), salt=rng.choice(["", "x"]))
    if rng.random() < 0.05:
        case.abort(rng.randint(1, 1 + len(case.events)))
    if rng.random() < 0.02:
        case.kv.flush()
    case.step()


# The small pools preempt and evict all the time; windows give pages back in mid-table.
@pytest.mark.parametrize(
    ("num_pages", "windows"), [(24, (None,)), (64, (None,)), (44, (None, 5)), (24, (7,))], ids=str
)
@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
def test_pictures_equal_a_slow_look(
    num_pages: int, windows: tuple[int | None, ...], overlap: bool
) -> None:
    """Red when a remembered page table, published page or folded chain goes stale."""
    rng = random.Random(num_pages)
    case = Case(num_pages=num_pages, overlap=overlap, windows=windows, max_num_batched_tokens=24)
    snapshots = Snapshots(case.core)
    seen: Counter[int] = Counter()
    for _ in range(400):
        random_step(case, rng)
        if rng.random() < 0.7:
            picture = snapshots.take()
            assert picture["pool"]["cells"] == slow_states(case.kv)
            assert picture["pool"]["windows"] == list(windows)
            assert fold_of(picture["tree"]) == slow_fold(case.kv)
            assert_parents_come_first(picture["tree"])
            seen.update(min(cell, 1) for cell in picture["pool"]["cells"])
    assert set(seen) == {FREE, CACHED, SHARED, 1}, "the walk did not visit every state"


def test_looking_changes_nothing() -> None:
    """Red when taking a snapshot moves a page, a hit count or a request."""
    plans, events = [], []
    for watched in (False, True):
        rng, case = random.Random(3), Case(num_pages=24, max_num_batched_tokens=24)
        snapshots = Snapshots(case.core)
        for _ in range(200):
            random_step(case, rng)
            if watched:
                snapshots.observe(case.plans[-1], 0.001) if case.plans else None
                snapshots.take()
        plans.append([(p.works, p.page_writes, p.page_copies) for p in case.plans])
        events.append(case.events)
    assert plans[0] == plans[1] and events[0] == events[1]


def test_it_is_plain_data() -> None:
    """Red when an array, a numpy number or an object of ours gets into the snapshot."""
    case = Case()
    case.add(list(range(20)), 8)
    case.add([1, 2, 3])
    for _ in range(3):
        case.step()
    snapshots = Snapshots(case.core)
    snapshots.observe(case.last_plan, 0.0142)
    picture = snapshots.take()
    assert json.loads(json.dumps(picture)) == picture
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(picture)) == picture
    assert picture["step_ms"] == 14.2 and picture["step"] == 3
    assert picture["counts"] == case.scheduler.stats().as_dict()
    assert picture["limits"] == {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
    }


def test_lanes_show_the_last_step() -> None:
    """Red when a lane shows another request's share, or a prompt chunk passes for a decode."""
    case = Case(max_num_batched_tokens=16, max_num_seqs=2)
    first = case.add(list(range(6)), 8)
    case.step()
    case.now = 1.0
    second = case.add(list(range(40, 70)), 8, priority=2)
    third = case.add([1, 2], 8)
    case.now = 1.5
    case.step()
    snapshots = Snapshots(case.core)
    snapshots.observe(case.last_plan, 0.0)
    picture = snapshots.take()
    lanes = {lane["id"]: lane for lane in picture["lanes"]}
    assert set(lanes) == {first.id, second.id}
    assert lanes[first.id] | {"row": first.row} == lanes[first.id]
    assert (lanes[first.id]["kind"], lanes[first.id]["fed"]) == ("decode", 1)
    assert (lanes[second.id]["kind"], lanes[second.id]["fed"]) == ("prefill", 15)
    assert (lanes[second.id]["prompt"], lanes[second.id]["computed"]) == (30, 15)
    assert (lanes[second.id]["known"], lanes[second.id]["output"]) == (30, 0)
    assert lanes[second.id]["priority"] == 2
    assert lanes[second.id]["pages"] == len(case.kv.table(second))
    assert picture["waiting"] == [{"id": third.id, "prompt": 2, "waited_s": 0.5, "priority": 0}]
    assert picture["num_waiting"] == 1
    case.step()
    case.step()
    snapshots.observe(StepPlan(), 0.0)  # a step that fed nobody
    kinds = {lane["id"]: (lane["kind"], lane["fed"]) for lane in snapshots.take()["lanes"]}
    assert kinds == {first.id: ("decode", 0), second.id: ("decode", 0)}


def test_a_preempted_request_computing_again_is_a_prefill() -> None:
    """Red when outputs that are computed again look like new tokens."""
    case = Case(num_pages=12, max_num_seqs=4)
    for base in (0, 20, 40):
        case.add(list(range(base, base + 8)), 24)
    snapshots, kinds = Snapshots(case.core), set()
    while case.core.has_work:
        case.step()
        snapshots.observe(case.last_plan, 0.0)
        for lane in snapshots.take()["lanes"]:
            if lane["preempted"] and lane["fed"] > 1:
                kinds.add(lane["kind"])
    assert kinds == {"prefill"}


def test_lists_are_bounded() -> None:
    """Red when a full house makes the snapshot grow without limit."""
    config = SchedConfig(max_num_seqs=300, max_num_batched_tokens=4096, max_model_len=64)
    scheduler = Scheduler(config, KVManager(2000, 4))
    core = EngineCore(scheduler, InstantRunner(), overlap=False)
    for id in range(1, 501):
        core.add(Request.new(id, [id % 90, id // 90], SamplingParams(max_tokens=50)))
    core.step()
    picture = Snapshots(core).take()
    assert len(picture["lanes"]) == MAX_LANES < len(scheduler.running) == 300
    assert len(picture["waiting"]) == MAX_WAITING < picture["num_waiting"] == 200
    assert [r["id"] for r in picture["waiting"]] == list(range(301, 301 + MAX_WAITING))


def test_a_large_pool_shows_the_most_alive_page_of_each_cell() -> None:
    """Red when a cell hides its live page behind a free or cached neighbour."""
    config = SchedConfig(max_num_seqs=64, max_num_batched_tokens=1 << 16, max_model_len=2048)
    scheduler = Scheduler(config, KVManager(10_001, 4))
    core = EngineCore(scheduler, InstantRunner(), overlap=False)
    rng = random.Random(0)
    shared = [rng.randrange(1000) for _ in range(101)]
    for id in range(1, 41):
        tail = [rng.randrange(1000) for _ in range(rng.randint(1, 900))]
        max_tokens = 2 if id % 2 else 50
        core.add(Request.new(id, shared + tail, SamplingParams(max_tokens=max_tokens)))
    snapshots = Snapshots(core)
    for _ in range(6):
        core.step()
        pool = snapshots.take()["pool"]
        assert (pool["pages_per_cell"], len(pool["cells"])) == (3, 3334)
        assert len(pool["cells"]) <= MAX_CELLS
        states = slow_states(scheduler.kv)
        for index, cell in enumerate(pool["cells"]):
            group = states[index * 3 : index * 3 + 3]
            owners = [state for state in group if state > 0]
            if SHARED in group:
                assert cell == SHARED
            elif owners:
                assert cell in owners
            else:
                assert cell == min(group)  # cached if any is


# ---------------------------------------------------------------- the tree


def grow(kv: KVManager, parent: Node | None, page: int, hits: int = 0) -> Node:
    tokens = page.to_bytes(4, "little") * kv.page_size
    key = kv.tree.child_key(parent.key if parent else b"root", tokens)
    node = kv.tree.insert(key, parent, tokens, [page])
    node.num_hits = hits
    kv.allocator.node_of[page] = node
    return node


def test_a_large_tree_is_scanned_in_slices() -> None:
    """Red when one look walks the whole of a large tree, or the slices never come together."""
    kv = KVManager(4 * SLICE + 100, 4)
    rng, nodes = random.Random(5), []
    for page in range(1, 3 * SLICE):
        parent = rng.choice(nodes[-50:]) if nodes and rng.random() < 0.98 else None
        if rng.random() < 0.9 and nodes:
            parent = nodes[-1]
        hits = rng.randint(0, parent.num_hits) if parent and rng.random() < 0.05 else 0
        nodes.append(grow(kv, parent, page, parent.num_hits if parent and not hits else hits))
    exact = slow_fold(kv)
    assert len(exact) > MAX_SEGMENTS, "the tree must be too large to show"
    picture = TreePicture(kv)
    first = picture.rows()
    assert sum(row["pages"] for row in first) <= SLICE
    for _ in range(3):
        rows = picture.rows()
    assert len(rows) == MAX_SEGMENTS
    assert fold_of(rows) - exact == Counter()
    assert_parents_come_first(rows)


def test_the_most_hit_are_shown() -> None:
    """Red when two hundred quiet prefixes push out the popular one."""
    kv = KVManager(2000, 4)
    popular = grow(kv, None, 1, hits=50)
    grow(kv, popular, 2, hits=40)
    for page in range(3, 900):
        grow(kv, None, page)
    rows = TreePicture(kv).rows()
    assert [(row["id"], row["parent"], row["hits"]) for row in rows[:2]] == [(1, 0, 50), (2, 1, 40)]
    assert len(rows) == MAX_SEGMENTS
    assert [row["id"] for row in rows[2:5]] == [899, 898, 897], "then the newest"


def test_a_path_deeper_than_the_limit_shows_its_top() -> None:
    """Red when a long conversation that branches at every page shows nothing, or orphans."""
    kv = KVManager(2000, 4)
    spine = grow(kv, None, 1)
    for page in range(2, 900, 2):
        grow(kv, spine, page + 1)
        spine = grow(kv, spine, page)
    rows = TreePicture(kv).rows()
    assert len(rows) == MAX_SEGMENTS
    assert_parents_come_first(rows)


def test_an_evicted_segment_is_not_shown() -> None:
    """Red when the picture of a large tree keeps showing pages that now hold something else."""
    kv = KVManager(4 * SLICE, 4)
    for page in range(1, 2 * SLICE):
        grow(kv, None, page, hits=1 if page == 1 else 0)
    picture = TreePicture(kv)
    picture.rows(), picture.rows()
    assert picture.rows()[0]["id"] == 1
    node = kv.allocator.node_of[1]
    assert node is not None
    kv.tree.remove(node)
    kv.allocator.node_of[1] = None
    assert 1 not in {row["id"] for row in picture.rows()}
    other = grow(kv, None, 1)  # the page holds another prefix now
    assert other is kv.allocator.node_of[1]
    assert 1 not in {row["id"] for row in picture.rows()}


def test_heads_are_the_first_tokens() -> None:
    """Red when the text shown for a segment is not where it starts."""
    case = Case(page_size=4, max_model_len=128)
    prompt = [token % VOCAB for token in range(3, 60)]
    case.add(prompt, 1)
    case.run()
    (row,) = TreePicture(case.kv).rows()
    assert row["head"] == prompt[:MAX_HEAD_TOKENS]
    assert (row["pages"], row["tokens"]) == (14, 56)
    wide = Case(page_size=64, max_model_len=128, num_pages=4)
    wide.add(prompt + prompt[:10], 1)
    wide.run()
    assert TreePicture(wide.kv).rows()[0]["head"] == prompt[:MAX_HEAD_TOKENS]
