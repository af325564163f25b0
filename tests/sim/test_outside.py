"""Simulated engines that keep pages outside the pool, or get them from engines that prefill."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from quire.bench.serve.figures import figures
from quire.bench.serve.work import Ask, asks, poisson_times
from quire.cli.main import main
from quire.errors import BadRequest
from quire.sim.engine import SimEngine
from quire.sim.outside import Link, Places
from quire.sim.simulate import Fleet, Simulated, simulate
from tests.sim.tables import ask, table

PAGE = 4 * 1000  # bytes


def engine(places: Places, **changes: object) -> SimEngine:
    return replace(SimEngine.of(table(**changes)), places=places)


def test_a_handover_takes_its_bytes() -> None:
    """Red when pages cross for nothing, or a prompt is computed twice: chunks of 64 tokens and of
    1, then 16 pages on the link, then the last token where it is decoded."""
    fast = engine(Places(engines=Link(1e6, 0.002)))
    done = simulate(Fleet(fast, 1, prefill=1), [ask(0.0, 65, 3)])
    prefilled, crossed = 0.073 + 0.010, 0.002 + 16 * PAGE / 1e6
    first = prefilled + crossed + 0.010
    assert done.outcomes[0].token_times == pytest.approx([first, first + 0.010, first + 0.020])
    assert done.nodes[0].outside.loads == 16
    assert done.nodes[0].stats.num_fed_tokens == 1 + 2
    assert done.prefill[0].stats.num_fed_tokens == 65


def test_a_link_takes_one_after_another() -> None:
    """Red when everybody has all of a link."""
    slow = engine(Places(engines=Link(64_000.0, 0.0)))
    both = [ask(0.0, 65, 1, "a."), ask(0.0, 65, 1, "b.")]
    first, second = (o.ended for o in simulate(Fleet(slow, 1, prefill=2), both).outcomes)
    assert abs(second - first) > 0.9 * 16 * PAGE / 64_000


def alternating(places: Places) -> Simulated:
    """Six long prompts come round again; the pool holds two of them, memory and disk all."""
    work = [ask(float(i), 100, 4, f"{i % 6}.") for i in range(18)]
    return simulate(engine(places, num_pages=60, max_num_batched_tokens=128), work)


def test_what_left_the_pool_is_loaded() -> None:
    """Red when memory or a disk is not looked up, or a slow one is waited for."""
    link = Link(1e8, 1e-4)
    none = alternating(Places())
    memory = alternating(Places(memory=200 * PAGE, memory_link=link))
    disk = alternating(Places(disk=200 * PAGE, disk_link=link, memory_link=link))
    assert none.stats.prefix_hit_tokens == 0
    for kept in (memory, disk):
        assert kept.stats.num_fed_tokens < 0.45 * none.stats.num_fed_tokens
        assert kept.nodes[0].outside.loads == 12 * 25
        assert kept.outcomes[-1].ended < none.outcomes[-1].ended
    small = alternating(Places(memory=30 * PAGE, memory_link=link))
    assert small.stats.num_fed_tokens == none.stats.num_fed_tokens
    crawling = alternating(Places(memory=200 * PAGE, memory_link=Link(1e4)))
    assert crawling.nodes[0].outside.loads == 0
    assert crawling.nodes[0].outside.recomputed == 12


def test_a_cpu_need_not_wait_for_memory() -> None:
    """Red when pages cross a link that is not there, or what memory has is not used because the
    disk is too slow."""
    here = alternating(Places(memory=200 * PAGE))
    assert here.nodes[0].outside.loads == 12 * 25
    again = [one.token_times[0] - one.meant for one in here.outcomes[6:]]
    assert again == pytest.approx([0.010] * 12)
    crawling = alternating(Places(disk=200 * PAGE, disk_link=Link(1e4)))
    assert crawling.nodes[0].outside.loads == 0


def test_more_bandwidth_is_never_slower() -> None:
    """Red when a faster link or disk lets somebody wait longer."""
    runs = [
        alternating(Places(memory=200 * PAGE, memory_link=Link(rate, 1e-4)))
        for rate in (2e6, 1e7, 1e9)
    ]
    for slower, faster in pairwise(runs):
        for before, after in zip(slower.outcomes, faster.outcomes, strict=True):
            assert after.token_times[0] <= before.token_times[0]


@pytest.mark.parametrize("prefill", [0, 1, 3])
def test_nothing_is_lost_on_the_way(prefill: int) -> None:
    """Red when a request that waits for pages, or is handed over, ends twice or never."""
    rng = random.Random(prefill)
    sizes = [(rng.randint(3, 60), rng.randint(1, 30)) for _ in range(60)]
    work = asks(poisson_times(60, 40.0, 1, 0), sizes, 0, shared=2)
    places = Places(
        memory=40 * PAGE,
        memory_link=None if prefill == 1 else Link(1e6),
        disk=90 * PAGE,
        disk_link=Link(1e6),
        engines=Link(1e6) if prefill else None,
    )
    done = simulate(Fleet(engine(places, num_pages=90), 2, prefill=prefill), work)
    assert [o.num_output for o in done.outcomes] == [one.num_output for one in work]
    assert sum(node.stats.num_finished for node in done.nodes) == 60
    assert sum(node.stats.num_finished for node in done.prefill) == (60 if prefill else 0)
    assert all(o.ended == o.token_times[-1] for o in done.outcomes)


def test_prompts_elsewhere_do_not_hold_up_answers() -> None:
    """Red when engines that decode compute prompts all the same."""
    answers = [ask(0.0, 8, 60, f"a{i}.") for i in range(3)]
    prompts = [ask(0.1 + 0.15 * i, 60, 1, f"p{i}.") for i in range(5)]
    work: list[Ask] = [*answers, *prompts]

    def longest(fleet: Fleet) -> float:
        done = simulate(fleet, work)
        return float(figures(done.outcomes[:3], None)["gap_ms"]["max"])

    apart = Fleet(engine(Places(engines=Link(1e9))), 1, prefill=1)
    together = Fleet(engine(Places()), 2, "round-robin")
    assert longest(apart) < 0.5 * longest(together)


def test_pages_of_unknown_size_are_refused() -> None:
    """Red when bytes are made up for a table that does not say what a token takes."""
    with pytest.raises(BadRequest, match="bytes of a token"):
        simulate(engine(Places(memory=1000), token_bytes=0), [ask(0.0, 4, 1)])


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when the flags do not reach the engines, or what they did is not told."""
    path = tmp_path / "costs.json"
    table().write(path)
    words = ["simulate", str(path), "--rate", "10", "--prompt-len", "8-64", "--requests", "20"]
    assert main([*words, "--prefill", "1", "--decode", "2", "--link", "1", "--price", "3.6"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["devices"] == 3 and len(record["replicas"]) == 2
    assert sum(one["loads"] for one in record["outside"]) > 20
    assert main([*words, "--kv-host-memory", "1MiB"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["outside"][0]["saves"] > 20
    for wrong, word in (
        (["--decode", "2"], "--prefill"),
        (["--prefill", "1", "--replicas", "2"], "--decode"),
        (["--link", "0"], "--link 0"),
    ):
        assert main([*words, *wrong]) == 2
        assert word in capsys.readouterr().err
