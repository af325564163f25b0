"""Several simulated engines behind the real router's choice."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from quire.bench.serve.client import Outcome
from quire.bench.serve.work import Ask, asks, poisson_times
from quire.cli.main import main
from quire.engine.core import EngineCore
from quire.errors import BadRequest
from quire.kv.manager import KVManager
from quire.params import SamplingParams
from quire.request import Request
from quire.router.settings import POLICIES, Policy
from quire.sched.scheduler import Scheduler
from quire.sim.clock import Clock, TimedRunner
from quire.sim.engine import SimEngine
from quire.sim.simulate import Fleet, Simulated, simulate
from quire.sim.tables import table_named
from tests.sim.tables import ask, table


def one_engine(engine: SimEngine, work: list[Ask], clients: int | None) -> list[Outcome]:
    """The plainest loop there is: one engine, one clock, nobody in front."""
    facts, clock = engine.costs.engine, Clock()
    kv = KVManager(engine.num_pages, facts.page_size, engine.prefix_caching)
    scheduler = Scheduler(engine.sched, kv, clock)
    core = EngineCore(scheduler, TimedRunner(engine.costs, clock), facts.overlaps)
    words: dict[str, int] = {}
    outcomes = [Outcome(one.at) for one in work]
    first = len(work) if clients is None else clients
    due = sorted((work[i].at if clients is None else 0.0, i) for i in range(first))
    unsent = list(range(first, len(work)))
    while due or core.has_work:
        if not core.has_work:
            clock.move_to(due[0][0])
        while due and due[0][0] <= clock.now:
            at, index = due.pop(0)
            ids = [words.setdefault(w, 2 + len(words)) for w in work[index].prompt.split(" ")]
            params = SamplingParams(
                temperature=0.0, max_tokens=work[index].num_output, ignore_eos=True
            )
            outcomes[index].meant = outcomes[index].sent = at
            outcomes[index].num_prompt = len(ids)
            core.add(Request.new(index, ids, params, arrival=at))
        for event in core.step():
            outcome = outcomes[event.request_id]
            if event.tokens:
                outcome.token_times.append(clock.now)
                outcome.num_output += len(event.tokens)
            if event.finish is not None:
                outcome.ended = clock.now
                if unsent:
                    due = sorted([*due, (clock.now, unsent.pop(0))])
    return outcomes


@pytest.mark.parametrize("clients", [None, 6])
@pytest.mark.parametrize("overlaps", [False, True])
def test_one_replica_is_the_engine_alone(clients: int | None, overlaps: bool) -> None:
    """Red when the cluster's loop lets anything happen earlier or later, by one bit."""
    costs = table(overlaps=overlaps, num_pages=80, host_s=0.003, context_s=1e-5, pair_s=1e-6)
    rng = random.Random(1)
    sizes = [(rng.randint(4, 90), rng.randint(1, 60)) for _ in range(40)]
    work = asks(poisson_times(40, 12.0, 1, 0), sizes, 0, shared=3)
    engine = SimEngine.of(costs)
    done = simulate(engine, work, clients)
    assert done.outcomes == one_engine(engine, work, clients)
    assert done.stats.num_preempted > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_nothing_is_lost_and_nothing_made_up(policy: Policy, replicas: int) -> None:
    """Red when a request ends twice, never, or with other tokens than it asked for."""
    rng = random.Random(replicas)
    sizes = [(rng.randint(4, 60), rng.randint(1, 30)) for _ in range(60)]
    work = asks(poisson_times(60, 40.0, 1, 0), sizes, 0, shared=3)
    done = simulate(Fleet(SimEngine.of(table(num_pages=90)), replicas, policy), work)
    assert [o.num_output for o in done.outcomes] == [one.num_output for one in work]
    assert all(len(o.token_times) == o.num_output for o in done.outcomes)
    assert all(o.meant < o.token_times[0] and o.ended == o.token_times[-1] for o in done.outcomes)
    assert done.stats.num_finished == 60
    at = Counter(done.places)
    assert [node.stats.num_finished for node in done.nodes] == [at[i] for i in range(replicas)]


def test_requests_take_turns() -> None:
    """Red when round robin is not."""
    work = [ask(0.001 * i, 8, 4, f"{i}.") for i in range(12)]
    done = simulate(Fleet(SimEngine.of(table()), 3, "round-robin"), work)
    assert Counter(done.places) == {0: 4, 1: 4, 2: 4}
    assert done.places == [1, 2, 0] * 4


def test_the_router_does_not_know_what_comes() -> None:
    """Red when a step's end is known before the step is over: the second replica's only request
    ends after 13 ms, so at 5 ms both have one open, and it is the first one's turn."""
    work = [ask(0.0, 4, 50, "a."), ask(0.001, 4, 1, "b."), ask(0.005, 4, 1, "c.")]
    done = simulate(Fleet(SimEngine.of(table()), 2, "least-loaded"), work)
    assert done.places == [1, 0, 1]
    late = [*work[:2], ask(0.015, 4, 1, "c.")]
    assert simulate(Fleet(SimEngine.of(table()), 2, "least-loaded"), late).places == [1, 0, 0]


def conversations(pages: int, replicas: int, policy: Policy) -> Simulated:
    """16 conversations behind 8 system prompts take turns; four people speak at a time."""
    rng = random.Random(3)
    systems = [[f"s{i}.{j}" for j in range(128)] for i in range(8)]
    said = [list(systems[i % 8]) for i in range(16)]
    prompts, speakers = list[str](), list[int]()
    for turn in range(6):
        for number in rng.sample(range(16), 16):
            said[number] = said[number] + [f"t{turn}.{number}.{j}" for j in range(8)]
            prompts.append(" ".join(said[number]))
            speakers.append(number)
    costs = table(max_num_batched_tokens=256, num_pages=pages, times=(0.002, 0.022))
    work = [Ask(0.0, text, len(text.split(" ")), 2) for text in prompts]
    return simulate(Fleet(SimEngine.of(costs), replicas, policy), work, 4, speakers)


def test_a_router_that_knows_prefixes_finds_them() -> None:
    """Red when the router's index is not fed: two caches of half the load's size each serve it as
    well as one without an end, and taking turns wastes them."""
    endless = conversations(2000, 1, "prefix").stats.prefix_hit_rate
    shared = conversations(330, 2, "prefix").stats.prefix_hit_rate
    turns = conversations(330, 2, "round-robin").stats.prefix_hit_rate
    assert shared > 0.95 * endless
    assert turns < 0.8 * endless


@pytest.mark.parametrize("rate", [20.0, 60.0])
def test_requests_that_share_nothing_are_spread(rate: float) -> None:
    """Red when what an engine learned from being busy draws even more requests to it, or one that
    nobody asked yet is thought slow."""
    engine = SimEngine.of(table_named("h200-8b"))
    rng = random.Random(0)
    sizes = [(rng.randint(128, 1024), rng.randint(16, 64)) for _ in range(240)]
    work = asks(poisson_times(240, rate, 1, 0), sizes, 0)
    counts = Counter(simulate(Fleet(engine, 4), work).places)
    assert max(counts.values()) - min(counts[i] for i in range(4)) <= 12, counts


def test_a_conversation_waits_for_its_answer() -> None:
    """Red when a conversation's next question is sent while the one before is open."""
    work = [ask(0.0, 4, 10, f"{i}.") for i in range(9)]
    speakers = [0, 0, 0, 1, 1, 2, 0, 1, 2]
    done = simulate(Fleet(SimEngine.of(table()), 2, "round-robin"), work, 3, speakers)
    for speaker in set(speakers):
        own = sorted(
            (o.sent, o.ended) for o, s in zip(done.outcomes, speakers, strict=True) if s == speaker
        )
        assert all(end <= begin for (_, end), (begin, _) in pairwise(own))


def test_requests_without_enough_pages_are_named() -> None:
    """Red when a simulation never ends because a request's pages cannot all be there."""
    with pytest.raises(BadRequest, match="33 pages, the engine has 20"):
        simulate(SimEngine.of(table(num_pages=20)), [ask(0.0, 100, 30)])


def test_command_of_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when the record does not say what each replica did, or charges for one alone."""
    path = tmp_path / "costs.json"
    table().write(path)
    words = ["simulate", str(path), "--rate", "30", "--prompt-len", "8-64", "--price", "3.6"]
    assert main([*words, "--replicas", "2", "--policy", "least-loaded"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sum(one["requests"] for one in record["replicas"]) == record["requests"]
    price = record["price_per_million_output_tokens"]
    assert price == pytest.approx(2e3 / record["output_tokens_per_s"], rel=1e-3)
