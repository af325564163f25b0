"""KVManager through a scheduler and the page-content runner, and by hand where that is clearer.

The runner refuses to answer when a page table does not spell the request's tokens, so every test
here also turns red when content is lost, shared wrongly or overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from quire.kv.check import check
from quire.kv.manager import KVManager
from quire.kv.prefix import Node
from quire.request import Request
from quire.step import PageCopy
from tests.doubles import FlakyTiers
from tests.unit.case import Case, expected

A = [1, 2, 3, 4, 5, 6, 0, 1, 3, 5, 0, 2]  # three pages of four


def cached_tokens(case: Case, prompt: list[int], **more) -> int:
    """How many tokens a request with this prompt would find now; leaves no trace but LRU order."""
    request = case.request(prompt, **more)
    found = case.kv.match(request)
    case.kv.release(request)
    return found


def note(case: Case, prompt: list[int], **more) -> str:
    request = case.request(prompt, **more)
    case.kv.match(request)
    case.kv.release(request)
    return request.cache_note


# ------------------------------------------------------------ hits


def test_hits_are_whole_pages_of_an_equal_prefix() -> None:
    """Red when partial pages are published, or a page hits after another prefix."""
    case = Case()
    case.add([*A, 1, 1], max_tokens=1)
    case.run()
    assert cached_tokens(case, [*A, 6, 6]) == 12
    assert cached_tokens(case, [*A[:8], 6, 6, 6, 6]) == 8
    assert cached_tokens(case, [*A, 1, 1, 6]) == 12, "a page that is not full must not be found"
    assert cached_tokens(case, [0, *A[1:]]) == 0
    assert cached_tokens(case, A[4:8] * 2) == 0, "page 1's content is not a prefix of its own"


def test_output_tokens_are_found_by_the_next_turn() -> None:
    """Red when only prompts are published: every chat turn would recompute the last answer."""
    case = Case()
    request = case.add(A, max_tokens=9)
    case.run()
    turn = request.tokens.tolist()
    # 12 + 9 known, the last one never fed: 20 computed, five pages
    assert cached_tokens(case, [*turn, 3, 3, 3]) == 20


def test_a_whole_cached_prompt_still_computes_exactly_one_token() -> None:
    """Red when a full hit feeds nothing (no logits to draw from) or recomputes a page."""
    case = Case()
    first = case.add(A, max_tokens=1)
    case.run()
    source = [node.pages[0] for node in case.kv.tree.nodes.values()]
    second = case.add(A, max_tokens=6)
    case.step()
    (work,) = case.last_plan.works
    assert (work.start, work.num_tokens, work.sample) == (11, 1, True)
    assert second.num_cached == 11
    # The last page is copied before it is written: the tree's content stays as it is.
    (copy,) = case.last_plan.page_copies
    assert copy.source in source and copy.target not in source
    assert case.runner.num_copied == 1
    case.run()
    assert second.output == expected(second, 6)
    assert first.output == second.output[:1]
    assert cached_tokens(case, [*A, 6]) == 12
    assert case.kv.counts.copied_pages == 1


def test_counts_tell_hits_from_queries() -> None:
    """Red when the hit rate counts requests, outputs or nothing."""
    case = Case()
    case.add([*A, 6], max_tokens=1)
    case.run()
    case.add([*A, 5], max_tokens=1)
    case.run()
    stats = case.scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (26, 12)
    assert stats.prefix_hit_rate == 12 / 26
    hits = sorted(node.num_hits for node in case.kv.tree.nodes.values())
    assert hits == [1, 1, 1]


def test_nothing_is_published_before_its_result_is_known() -> None:
    """Red when a page is offered while the step that fills it is still in flight."""
    case = Case(overlap=True)
    case.add(A, max_tokens=5)
    case.step()  # launched, not settled
    assert case.kv.tree.nodes == {}
    assert cached_tokens(case, [*A, 1]) == 0
    case.step()
    assert cached_tokens(case, [*A, 1]) == 12


def test_without_prefix_caching_nothing_is_kept() -> None:
    """Red when enable_prefix_caching=False still publishes, or breaks n > 1."""
    case = Case(caching=False)
    case.add(A, max_tokens=1)
    case.run()
    assert case.kv.tree.nodes == {} and case.kv.allocator.num_cached == 0
    again = case.add(A, max_tokens=3, n=3)
    children = list(again.children)
    case.run()
    assert again.num_cached == 0
    assert [r.output for r in children] == [expected(r, 3) for r in children]
    case.assert_all_returned()


# ------------------------------------------------------------ isolation


def test_salts_do_not_share() -> None:
    """Red when one tenant's timing can tell what another one asked."""
    case = Case()
    case.add([*A, 1], max_tokens=1, salt="one")
    case.run()
    assert cached_tokens(case, [*A, 1], salt="one") == 12
    assert cached_tokens(case, [*A, 1], salt="two") == 0
    assert cached_tokens(case, [*A, 1]) == 0


def test_a_salt_may_be_any_string() -> None:
    """Red when a salt with a lone surrogate, which JSON can carry, raises inside the scheduler."""
    case = Case()
    neighbour = case.add([1, 2, 3], max_tokens=5)
    request = case.add([*A, 1], max_tokens=2, salt="\ud800")
    case.run()
    assert request.output == expected(request, 2)
    assert neighbour.output == expected(neighbour, 5)


def test_a_forged_key_collision_is_a_miss() -> None:
    """Red when a hit trusts the key: another request's keys and values would be read."""
    case = Case()
    tree = case.kv.tree
    tokens = Request.new(0, A[:4], case.request(A).params).tokens.tobytes()
    key = tree.child_key(tree.root_key(""), tokens)
    page = case.kv.allocator.take()
    forged = tree.insert(key, None, b"other tokens", [page])
    case.kv.allocator.node_of[page] = forged
    assert cached_tokens(case, [*A, 1]) == 0


# ------------------------------------------------------------ sharing


def test_equal_prompts_computed_at_once_end_up_on_the_same_pages() -> None:
    """Red when both copies stay: pages wasted, and live nodes with evictable ancestors."""
    case = Case()
    first, second = case.add([*A, 1], max_tokens=8), case.add([*A, 1], max_tokens=8)
    case.step()
    assert case.kv.table(first)[:3] == case.kv.table(second)[:3]
    assert case.kv.table(first)[3] != case.kv.table(second)[3]
    assert case.kv.counts.shared_pages == 3
    assert case.kv.allocator.num_live == 5
    case.step()
    moved = {(w.row, w.column): w.page for w in case.last_plan.page_writes}
    assert [moved[second.row, i] for i in range(3)] == list(case.kv.table(first)[:3])
    case.run()
    assert first.output == second.output == expected(first, 8)
    case.assert_all_returned()


def test_siblings_share_full_pages_and_copy_the_partial_one() -> None:
    """Red when n > 1 recomputes the prompt, or two siblings write into one page."""
    case = Case()
    parent = case.add([*A, 1, 2], max_tokens=8, n=3)
    siblings = [parent, *parent.children]
    case.step()
    case.step()
    tables = [case.kv.table(r) for r in siblings]
    assert tables[0][:3] == tables[1][:3] == tables[2][:3]
    assert len({table[3] for table in tables}) == 3
    assert len(case.last_plan.page_copies) == 2
    assert {c.source for c in case.last_plan.page_copies} == {tables[0][3]}
    fed = case.fed()
    assert [fed[r.id] for r in siblings] == [1, 1, 1], "a sibling feeds the last prompt token only"
    case.run()
    assert [r.output for r in siblings] == [expected(r, 8) for r in siblings]
    assert [r.num_cached for r in siblings] == [0, 13, 13]
    case.assert_all_returned()


def test_siblings_of_a_page_aligned_prompt_copy_too() -> None:
    """Red when the fork forgets that the last full page is about to be written."""
    case = Case()
    parent = case.add(A, max_tokens=6, n=2)
    child = parent.children[0]
    case.run()
    assert [r.output for r in (parent, child)] == [expected(r, 6) for r in (parent, child)]
    assert case.kv.counts.copied_pages == 1
    assert child.num_cached == 11


def test_a_sibling_born_after_its_parent_ended_uses_the_tree() -> None:
    """Red when a fork reads the page table of a request that has left."""
    case = Case(max_num_seqs=1)
    parent = case.add([*A, 1, 2], max_tokens=1, n=2)
    child = parent.children[0]
    case.run()
    assert child.output == expected(child, 1)
    assert child.num_cached == 12
    case.assert_all_returned()


def test_a_sibling_does_not_trust_a_parent_that_starts_again() -> None:
    """Red when a preempted, readmitted parent's pages are shared before they are computed again."""
    case = Case(max_chunk=4, max_num_batched_tokens=16)
    parent = case.add([*A, 1, 2], max_tokens=8, n=2)
    child = parent.children[0]
    while parent.children:
        case.step()
    case.scheduler._preempt(parent, {})
    case.kv.flush()
    case.step()
    assert parent.is_running and child.is_running, "both must start in the same step"
    assert case.fed() == {parent.id: 4, child.id: 4}
    case.run()
    assert [r.output for r in (parent, child)] == [expected(r, 8) for r in (parent, child)]
    case.assert_all_returned()


# ------------------------------------------------------------ eviction


def test_leaves_go_before_their_parents() -> None:
    """Red when a chain is released root first: its middle would be evicted and the rest lost."""
    case = Case(num_pages=4)
    case.add([*A, 1, 1], max_tokens=1)
    case.run()
    found = []
    for _ in range(4):
        case.kv.allocator.take()
        check_free_standing(case.kv)
        found.append(cached_tokens(case, [*A, 1]))
    assert found == [12, 8, 4, 0]


def check_free_standing(kv: KVManager) -> None:
    """The tree's own invariant; `check` would complain about pages taken by nobody."""
    for node in kv.tree.nodes.values():
        assert node.parent is None or node.parent.key in kv.tree.nodes


def test_the_prefix_not_used_for_longest_goes_first() -> None:
    """Red when eviction ignores use: a hot system prompt would fall out."""
    case = Case(num_pages=7)
    old, new = [1] * 9, [2] * 9
    for prompt in (old, new, old):  # the third run refreshes the first
        case.add(prompt, max_tokens=1)
        case.run()
    case.add([3] * 16, max_tokens=1)  # needs four pages, three are empty
    case.run()
    assert cached_tokens(case, old) == 8
    assert cached_tokens(case, new) == 4


def test_flush_forgets_what_nobody_uses() -> None:
    """Red when a flush leaves hits behind or disturbs a running request."""
    case = Case()
    case.add([5] * 9, max_tokens=1)
    case.run()
    running = case.add([*A, 1], max_tokens=8)
    case.step()
    assert case.kv.flush() == 2
    check(case.kv)
    assert cached_tokens(case, [5] * 9) == 0
    assert cached_tokens(case, [*A, 1]) == 12, "a running request's pages stay known"
    case.run()
    assert running.output == expected(running, 8)
    case.kv.flush()
    assert case.kv.tree.nodes == {} and case.kv.allocator.num_cached == 0


# ------------------------------------------------------------ notes


def test_notes_say_why_there_was_no_hit() -> None:
    """Red when a reason is missing, stale or wrong: they are what a user sees."""
    case = Case(num_pages=4)
    assert note(case, [1, 2, 3]) == "prompt is shorter than one page of 4 tokens"
    assert note(case, A) == "page 0 of this prefix was not seen before"
    assert "every position computed" in note(case, A, prompt_logprobs=1)
    case.add([*A, 1], max_tokens=1)
    case.run()
    assert note(case, [*A, 1, 2]) == ""
    assert note(case, [*A[:8], 6, 6, 6, 6]) == "page 2 of this prefix was not seen before"
    case.add([6] * 8, max_tokens=1)
    case.run()
    assert note(case, [*A, 1]) == "page 2 of this prefix was evicted"
    assert note(Case(caching=False), A) == "prefix caching is off"


def test_prompt_logprobs_compute_every_position() -> None:
    """Red when a hit swallows positions whose log-probabilities were asked for."""
    case = Case()
    case.add([*A, 1], max_tokens=1)
    case.run()
    request = case.add([*A, 1], max_tokens=1, prompt_logprobs=2)
    case.step()
    assert case.fed() == {request.id: 13}
    assert request.num_cached == 0


# ------------------------------------------------------------ reserve


def test_reserve_is_all_or_nothing() -> None:
    """Red when a failed reservation keeps pages or stages writes."""
    case = Case(num_pages=3)
    request = case.request([1] * 20)
    case.kv.match(request)
    assert not case.kv.reserve(request, 0, 20)
    assert case.kv.num_available == 3
    assert case.kv.table(request) == ()
    assert case.kv.take_edits() == ((), ())
    assert case.kv.reserve(request, 0, 12)
    assert len(case.kv.table(request)) == 3


def test_reserve_counts_the_page_a_copy_needs() -> None:
    """Red when copy-on-write takes a page that the check did not count."""
    case = Case(num_pages=3)
    case.add(A[:8], max_tokens=1)
    case.run()
    blocker = case.kv.allocator.take()
    hit = case.request(A[:8])
    cached = case.kv.match(hit)
    assert cached == 7 and case.kv.num_available == 0
    assert not case.kv.reserve(hit, cached, 8)
    case.kv.allocator.drop(blocker)
    assert case.kv.reserve(hit, cached, 8)
    _, copies = case.kv.take_edits()
    assert len(copies) == 1 and isinstance(copies[0], PageCopy)


def test_edits_are_handed_over_once() -> None:
    """Red when a plan repeats old page writes."""
    case = Case()
    request = case.request(A)
    case.kv.match(request)
    case.kv.reserve(request, 0, 12)
    writes, _ = case.kv.take_edits()
    assert [(w.column, w.page) for w in writes] == list(enumerate(case.kv.table(request)))
    assert case.kv.take_edits() == ((), ())


def test_release_twice_is_harmless() -> None:
    """Red when abort after finish drops pages a second time."""
    case = Case()
    request = case.request(A)
    case.kv.match(request)
    case.kv.reserve(request, 0, 12)
    case.kv.release(request)
    case.kv.release(request)
    check(case.kv)
    assert case.kv.allocator.num_live == 0


# ------------------------------------------------------------ check itself


def lose_a_page(kv: KVManager) -> None:
    kv.allocator._empty.pop()


def count_a_holder_twice(kv: KVManager) -> None:
    kv.allocator.refs[next(iter(kv.holdings().values()))[0]] += 1


def cache_a_live_page(kv: KVManager) -> None:
    page = next(iter(kv.holdings().values()))[0]
    kv.allocator._cached[page] = None
    kv.allocator._empty.pop()


def name_a_page_twice(kv: KVManager) -> None:
    held = next(iter(kv._held.values()))
    (table,) = held.tables
    kv.allocator.refs[table[0]] += 1
    kv.allocator.refs[table[-1]] -= 1
    kv.allocator._empty.append(table[-1])
    table[-1] = table[0]


def lose_a_node(kv: KVManager) -> None:
    key = next(key for key, node in kv.tree.nodes.items() if not node.num_children)
    del kv.tree.nodes[key]


def orphan_a_node(kv: KVManager) -> None:
    leaf = next(node for node in kv.tree.nodes.values() if node.parent)
    leaf.parent = Node(b"nobody", None, b"", [0])


def miscount_children(kv: KVManager) -> None:
    next(iter(kv.tree.nodes.values())).num_children += 1


BREAKS = [
    lose_a_page,
    count_a_holder_twice,
    cache_a_live_page,
    name_a_page_twice,
    lose_a_node,
    orphan_a_node,
    miscount_children,
]


@pytest.mark.parametrize("damage", BREAKS, ids=lambda damage: damage.__name__)
def test_check_sees(damage: Callable[[KVManager], None]) -> None:
    """Red when an invariant is dropped from `check`: every fuzz test would get weaker unnoticed."""
    case = Case()
    case.add([*A, 1], max_tokens=8)
    case.step()
    check(case.kv)
    damage(case.kv)
    with pytest.raises(AssertionError):
        check(case.kv)


def test_a_loaded_page_of_the_only_token_is_in_the_table() -> None:
    """Red when a prompt of one token, which is computed although its page was loaded, is written
    to the page that its row's last request had there, and others find by now."""
    num_loaded = 0
    for seed in range(8):
        case = Case(page_size=1, num_pages=24, max_num_seqs=1)
        case.kv.connect(FlakyTiers(case.runner, Random(seed)))
        case.add([5], 1)
        case.run()
        case.kv.flush()
        for prompt in ([1, 2, 3, 4], [5], [1, 2, 3, 4]):
            request = case.add(prompt, 1)
            case.run()
            assert request.output == expected(request, 1)
        num_loaded += case.runner.num_loaded
    assert num_loaded
