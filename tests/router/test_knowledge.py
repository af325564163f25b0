"""What the router knows of caches and times, and whom it chooses by it."""

from __future__ import annotations

import random
from array import array

import pytest

from quire.errors import BadRequest
from quire.kv.cache_news import CacheLog
from quire.kv.prefix import PrefixTree
from quire.kv.route_keys import child_route_key, root_route_key
from quire.router import prefix_index
from quire.router.choose import Chooser, Prompt
from quire.router.first_token import FirstTokenTimes
from quire.router.place import Place
from quire.router.prefix_index import CacheNews, PrefixIndex
from quire.router.prompt_keys import TextKeys
from quire.router.settings import POLICIES, RouterSettings, UpstreamAddress
from quire.router.upstream import State, Upstream


def upstream(name: str) -> Upstream:
    made = Upstream(UpstreamAddress(name, "127.0.0.1", 1))
    made.came_up()
    return made


def page(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def news_of(log: CacheLog, index: PrefixIndex) -> CacheNews:
    found = log.since(index.epoch, index.next)
    return CacheNews(**{**found, "is_whole": bool(found["is_whole"])})


def route_keys(salt: str, *pages: bytes) -> list[bytes]:
    keys = [root_route_key(salt)]
    for tokens in pages:
        keys.append(child_route_key(keys[-1], tokens))
    return keys[1:]


@pytest.mark.parametrize("seed", range(4))
def test_an_index_follows_a_tree(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes come and go, news is read now and then, at times too late. Red when the index holds a
    page the tree has not, or lacks one it has."""
    monkeypatch.setattr("quire.kv.cache_news.MOST_CHANGES", 12)
    dice, tree, index = random.Random(seed), PrefixTree(), PrefixIndex()
    salts = ("", "me/", "you")
    names: dict[bytes, bytes] = {}
    log: CacheLog | None = None
    for turn in range(300):
        nodes = list(tree.nodes.values())
        leaves = [node for node in nodes if node.num_children == 0]
        if nodes and dice.random() < 0.45:
            node = dice.choice(leaves)
            tree.remove(node)
            del names[node.key]
        else:
            parent = dice.choice([None, *nodes])
            salt, tokens = dice.choice(salts), page(dice.randrange(6), 7)
            above = tree.root_key(salt) if parent is None else parent.key
            key = tree.child_key(above, tokens)
            if key not in tree.nodes:
                root = root_route_key(salt) if parent is None else names[parent.key]
                names[key] = child_route_key(root, tokens)
                if dice.random() < 0.5:
                    tree.insert(key, parent, tokens, [1])
                else:
                    tree.insert_chain(parent, tree.chain(above, tokens, len(tokens)), [[1]])
        if turn == 40:
            log = CacheLog(tree, 2)
        if log is not None and dice.random() < 0.12:
            assert index.take(news_of(log, index), float(turn))
            assert index._known == set(names.values())
    assert 1 < index.num_resyncs < 40  # some news came too late, most did not


def test_another_life_of_the_process_is_told_whole() -> None:
    """Red when changes of one process are added to what another had."""
    tree, index = PrefixTree(), PrefixIndex()
    tree.insert(tree.child_key(tree.root_key("a"), page(1)), None, page(1), [1])
    first, second = CacheLog(tree, 1), CacheLog(PrefixTree(), 1)
    index.take(news_of(first, index), 0.0)
    assert index.num_cached(route_keys("a", page(1)), 0.0) == 1
    assert not index.take(CacheNews("other", 5, 1, False), 0.0)
    index.take(news_of(second, index), 0.0)
    assert index.num_cached(route_keys("a", page(1)), 0.0) == 0


def test_promises_last_until_they_must_have_been_kept() -> None:
    keys = route_keys("", page(1), page(2), page(3))
    published, silent = PrefixIndex(), PrefixIndex()
    published.take(CacheNews("e", 0, 16, True), 0.0)
    for index in (published, silent):
        index.promise(keys[:2], 0.0)
        assert index.num_cached(keys, 1.0) == 2
    later = prefix_index.PROMISE_S + 1
    assert (published.num_cached(keys, later), silent.num_cached(keys, later)) == (0, 2)


def test_a_promise_ends_with_what_it_promised() -> None:
    """Red when a small cache has dropped a prefix and requests still follow it there."""
    keys = route_keys("", page(1), page(2))
    names = [key.hex() for key in keys]
    index = PrefixIndex()
    index.take(CacheNews("e", 0, 16, True, added=names[0]), 0.0)
    index.promise(keys, 1.0)
    index.take(CacheNews("e", 2, 16, False, added=names[1]), 1.5)  # kept
    assert index.num_cached(keys, 1.6) == 2
    index.take(CacheNews("e", 4, 16, False, removed="".join(names)), 2.0)
    assert index.num_cached(keys, 2.1) == 0
    index.promise(keys, 2.2)  # sent after the last news: it will be computed again
    index.take(CacheNews("e", 5, 16, False, removed=names[1]), 2.5)
    assert index.num_cached(keys, 2.6) == 2


def test_a_full_cache_is_known_by_what_it_drops() -> None:
    """Red when computing a prefix once more looks free where it displaces others."""
    index = PrefixIndex()
    index.take(CacheNews("e", 0, 16, True), 0.0)
    keys = [key.hex() for key in route_keys("", *(page(i) for i in range(200)))]
    index.take(CacheNews("e", 1, 16, False, added="".join(keys[:100])), 1.0)
    assert index.displaced == 0.0
    dropped = CacheNews("e", 2, 16, False, added="".join(keys[100:]), removed="".join(keys[:100]))
    index.take(dropped, 2.0)
    assert 0.5 < index.displaced <= 1.0
    index.take(CacheNews("e", 3, 16, False, removed=keys[100]), 3.0)  # a flush displaces nothing
    assert 0.5 < index.displaced <= 1.0
    index.forget()
    assert index.displaced == 0.0


def test_times_are_learned() -> None:
    """Red when the fit is off, or an estimate is negative or free."""
    times = FirstTokenTimes()
    assert times.rates == pytest.approx((2e-4, 5e-3), rel=0.01)
    dice = random.Random(0)
    for _ in range(300):
        tokens, requests = dice.randrange(10, 4_000), dice.randrange(1, 30)
        times.saw(tokens, requests, tokens * 1e-3 + requests * 0.02)
    assert times.rates == pytest.approx((1e-3, 0.02), rel=0.01)
    odd = FirstTokenTimes()
    for _ in range(50):
        odd.saw(100, 5, 0.0)
        odd.saw(5_000, 1, 0.0)
    assert min(odd.rates) > 0


def test_a_slower_machine_is_asked_less() -> None:
    """Red when upstreams of unequal speed are taken for equal, or equal ones for unequal."""
    quick, slow, dice = upstream("quick"), upstream("slow"), random.Random(1)
    for _ in range(100):
        tokens, requests = dice.randrange(10, 4_000), dice.randrange(1, 30)
        seconds = (tokens * 1e-3 + requests * 0.02) * dice.uniform(0.9, 1.1)
        quick.times.saw(tokens, requests, seconds)
        slow.times.saw(tokens, requests, 3 * seconds)
    together = FirstTokenTimes.of_all([quick.times, slow.times]).rates
    assert slow.times.pace(together) / quick.times.pace(together) == pytest.approx(3.0, rel=0.1)
    alike = quick.times.rates
    assert (quick.times.pace(alike), FirstTokenTimes().pace(alike)) == (1.0, 1.0)
    chooser, prompt = Chooser("prefix", clock=lambda: 1.0), Prompt(1_600, 16, ())
    assert {chooser.choose([quick, slow], prompt) for _ in range(4)} == {quick}


def test_a_prefix_is_worth_its_seconds_and_no_more() -> None:
    """Red when the upstream that holds a prefix is chosen however long its queue is."""
    holder, idle = upstream("holder"), upstream("idle")
    keys = route_keys("", *(page(i) for i in range(100)))
    prompt = Prompt(1_600, 16, keys)
    holder.index.promise(keys, 0.0)
    chooser = Chooser("prefix", clock=lambda: 1.0)
    for _ in range(4):
        assert chooser.choose([holder, idle], prompt) is holder
    holder.pending_tokens = 5_000
    assert chooser.choose([holder, idle], prompt) is idle
    assert chooser.choose([holder, idle], prompt, [idle]) is holder
    holder.pending_tokens = 0
    holder.index.take(CacheNews("e", 0, 16, True), -100.0)  # nothing heard for long
    holder.num_open = 1
    assert chooser.choose([holder, idle], prompt) is idle


def test_nobody_is_chosen_by_what_was_held_long_ago() -> None:
    """Red when the news of all caches is stale and anything but the load decides."""
    holder, idle = upstream("holder"), upstream("idle")
    keys = route_keys("", *(page(i) for i in range(100)))
    prompt = Prompt(1_600, 16, keys)
    for one, added in ((holder, "".join(key.hex() for key in keys)), (idle, "")):
        one.index.take(CacheNews("e", 0, 16, True, added), 0.0)
    idle.index.displaced = 1.0  # it was full when it was last heard of
    fresh, stale = (Chooser("prefix", clock=lambda at=at: at) for at in (1.0, 100.0))
    holder.num_open, holder.pending_tokens = 2, 200
    assert {fresh.choose([holder, idle], prompt) for _ in range(2)} == {holder}
    assert {stale.choose([holder, idle], prompt) for _ in range(2)} == {idle}
    idle.num_open, idle.pending_tokens = 3, 400
    assert {stale.choose([holder, idle], prompt) for _ in range(2)} == {holder}
    holder.num_open, holder.pending_tokens = 3, 400  # the same load: in turn
    idle.regret_s = holder.regret_s = 0.0
    assert {stale.choose([holder, idle], prompt) for _ in range(2)} == {holder, idle}


def test_a_prefix_that_many_ask_for_spreads() -> None:
    """Red when one upstream answers all who share a prefix while another has nothing to do."""
    holder, idle = upstream("holder"), upstream("idle")
    keys = route_keys("", *(page(i) for i in range(100)))
    prompt = Prompt(1_600, 16, keys)
    holder.index.promise(keys, 0.0)
    chooser = Chooser("prefix", clock=lambda: 1.0)
    holder.num_open = 60  # each a little; together less than the prefix is worth
    asked = [chooser.choose([holder, idle], prompt) for _ in range(40)]
    assert asked[0] is holder and idle in asked[:20]
    assert asked.count(idle) < 20  # each time it has to be paid for again


def test_chance_does_not_spread_a_prefix() -> None:
    """Red when a moment's queue has a prefix computed once more, as in a load that is even."""
    holder, other = upstream("holder"), upstream("other")
    keys = route_keys("", *(page(i) for i in range(100)))
    prompt = Prompt(1_600, 16, keys)
    holder.index.promise(keys, 0.0)
    chooser = Chooser("prefix", clock=lambda: 1.0)
    for turn in range(40):
        busy, free = (holder, other) if turn % 2 else (other, holder)
        busy.pending_tokens, free.pending_tokens = 1_600, 0
        assert chooser.choose([holder, other], prompt) is holder


def test_who_is_asked_at_all() -> None:
    a, b, c = upstream("a"), upstream("b"), upstream("c")
    b.is_leaving, c.state = True, State.DOWN
    for policy in POLICIES:
        chooser = Chooser(policy)
        assert {chooser.choose([a, b, c], Prompt()) for _ in range(3)} == {a}
        assert chooser.choose([b, c], Prompt()) is None
    turns = Chooser("round-robin")
    b.is_leaving = False
    assert {turns.choose([a, b], Prompt()) for _ in range(2)} == {a, b}
    a.num_open = 3
    assert Chooser("least-loaded").choose([a, b], Prompt()) is b
    assert {Chooser("prefix").choose([b, b], Prompt()) for _ in range(3)} == {b}


def test_text_keys_share_what_texts_share() -> None:
    """Red when keys of two conversations with one beginning do not begin alike."""
    system = {"role": "system", "content": "x" * 3_000}
    bodies = [
        {"model": "m", "messages": [system, {"role": "user", "content": text}]} for text in "ab"
    ]
    one, two = (TextKeys().prompt_of(body, "me", 0) for body in bodies)
    shared = sum(x == y for x, y in zip(one.keys, two.keys, strict=True))
    assert len(one.keys) == 5 == shared and one.num_tokens > 700
    other = TextKeys().prompt_of(bodies[0], "you", 0)
    assert not set(other.keys) & set(one.keys)
    assert TextKeys().prompt_of({"input": [1, 2]}, "", 0).num_tokens > 0


@pytest.mark.parametrize(
    "text", ["", "ftp://a", "http://", "a=b", "http://h:99999", "http://h?x=1"]
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(BadRequest, match="want"):
        UpstreamAddress.parse(text)


def test_addresses() -> None:
    assert UpstreamAddress.parse("http://h:81/x/") == UpstreamAddress("h:81", "h", 81, False, "/x")
    assert UpstreamAddress.parse("a=https://h") == UpstreamAddress("a", "h", 443, True, "")
    with pytest.raises(BadRequest, match="two upstreams are called 'a'"):
        RouterSettings(upstreams=(UpstreamAddress("a", "h", 1), UpstreamAddress("a", "h", 2)))


def test_a_place_is_remembered_and_given_back() -> None:
    """Red when what an upstream has pending does not come back to nothing, or its times are learned
    from whole answers."""
    keys = route_keys("", page(1), page(2))
    there, prompt = upstream("there"), Prompt(40, 16, keys)
    first = Place.take(there, prompt, 10.0)
    second = Place.take(there, prompt, 10.5)  # its two pages are promised
    assert (first.num_tokens, second.num_tokens) == (40, 8)
    assert (there.num_open, there.pending_tokens) == (2, 48)
    assert (there.prompt_tokens, there.hit_tokens) == (80, 32)
    first.first_byte(11.0, True)
    second.first_byte(11.0, False)
    assert (there.times.num_seen, there.pending_tokens, there.num_open) == (1, 0, 2)
    learned = FirstTokenTimes()
    learned.saw(40, 1, 1.0)
    assert there.times.rates == learned.rates
    first.leave()
    second.leave()
    assert (there.num_open, there.pending_tokens) == (0, 0)
    Place.take(there, prompt, 12.0).leave()  # it failed
    assert (there.num_open, there.pending_tokens, there.times.num_seen) == (0, 0, 1)
