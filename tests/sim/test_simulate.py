"""The simulator on tables whose answers can be counted on fingers, and on one that was measured."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

from quire.bench.serve.figures import Promise, figures
from quire.bench.serve.work import Ask, asks, poisson_times
from quire.cli.main import main
from quire.errors import BadRequest
from quire.sched.cost_table import CostTable, Load
from quire.sim.engine import SimEngine
from quire.sim.simulate import simulate
from tests.sim.tables import ask, table

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))


def times_of(engine: CostTable, *work: Ask) -> list[list[float]]:
    return [o.token_times for o in simulate(SimEngine.of(engine), work).outcomes]


def test_one_request_takes_what_its_steps_take() -> None:
    """Red when a step is charged twice, or not at all: 65 tokens are chunks of 64 and 1."""
    (times,) = times_of(table(), ask(1.0, 65, 3))
    first = 1.0 + (0.010 + 63 * 0.001) + 0.010
    assert times == pytest.approx([first, first + 0.010, first + 0.020])


def test_all_that_a_step_holds_is_charged() -> None:
    """Red when a coefficient of the table is not read."""
    engine = table(context_s=1e-3, pair_s=1e-4, sample_s=0.5, host_s=2.0, host_work_s=4.0)
    (times,) = times_of(engine, ask(0.0, 4, 2))
    prompt = 2.0 + 4.0 + 0.013 + 1e-4 * 4 * 2 + 0.5
    assert times == pytest.approx([prompt, prompt + 2.0 + 4.0 + 0.010 + 4e-3 + 0.5])


def test_with_overlap_the_host_works_meanwhile() -> None:
    """Red when the host's time is added to that of a device it runs ahead of."""
    alone = times_of(table(host_s=0.009), ask(0.0, 4, 20))[0]
    ahead = times_of(table(host_s=0.009, overlaps=True), ask(0.0, 4, 20))[0]
    assert alone[-1] - alone[0] == pytest.approx(19 * 0.019)
    assert ahead[-1] - ahead[0] == pytest.approx(19 * 0.010, rel=0.1)


def test_decisions_are_the_schedulers() -> None:
    """Red when a simulation does not know of shared prefixes, preemption or limits."""
    twice = [ask(0.0, 60, 2), ask(5.0, 60, 2)]
    with_cache = simulate(SimEngine.of(table()), twice)
    assert 50 < with_cache.stats.prefix_hit_tokens < 60
    first, second = (o.token_times[0] - o.meant for o in with_cache.outcomes)
    assert second < first / 2
    many = [ask(0.0, 40, 40, mark=f"{i}.") for i in range(8)]
    tight = simulate(SimEngine.of(table(num_pages=90)), many)
    assert tight.stats.num_preempted > 0
    narrow = SimEngine.of(table(max_num_seqs=1))
    ends = sorted(o.ended for o in simulate(narrow, many).outcomes)
    assert all(later - sooner > 0.3 for sooner, later in pairwise(ends))


def test_clients_in_a_closed_loop_wait_for_their_answers() -> None:
    """Red when more requests are open than there are clients."""
    done = simulate(SimEngine.of(table()), [ask(0.0, 4, 4, f"{i}.") for i in range(6)], clients=2)
    spans = [(o.sent, o.ended) for o in done.outcomes]
    for at, _ in spans:
        assert sum(begin <= at < end for begin, end in spans) <= 2


def test_goodput_falls_when_the_load_is_too_much() -> None:
    """Red when a queue costs nothing."""
    promise = Promise.parse("ttft=200")
    shares = []
    for rate in (1.0, 60.0):
        work = asks(poisson_times(60, rate, 1, 0), [(40, 20)] * 60, 0)
        found = figures(simulate(SimEngine.of(table()), work).outcomes, promise)
        shares.append(found["goodput"]["share"])
    assert shares[0] == 1.0
    assert shares[1] < 0.5


def test_requests_that_cannot_fit_are_named() -> None:
    """Red when a simulation never ends because a request can never run."""
    with pytest.raises(BadRequest, match="512"):
        simulate(SimEngine.of(table()), [ask(0.0, 500, 40)])


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when the command's last line is no JSON, or a damaged table is a traceback."""
    path = tmp_path / "costs.json"
    table().write(path)
    assert main(["simulate", str(path), "--rates", "1,30", "--prompt-len", "8-64",
                 "--slo", "ttft=100", "--price", "3.6"]) == 0  # fmt: skip
    records = json.loads(capsys.readouterr().out.splitlines()[-1])["rates"]
    assert [record["rate"] for record in records] == [1.0, 30.0]
    assert records[0]["ttft_ms"]["p50"] < records[1]["ttft_ms"]["p50"]
    # 3.6 an hour is a thousandth a second.
    price = records[1]["price_per_million_output_tokens"]
    assert price == pytest.approx(1e3 / records[1]["output_tokens_per_s"], rel=1e-3)
    path.write_text("{}")
    assert main(["simulate", str(path)]) == 2
    assert "quire bench costs" in capsys.readouterr().err


def test_loads_are_read_off_plans() -> None:
    """Red when drafts, chunks and decodes are confused."""
    from quire.step import StepPlan, Work

    plan = StepPlan((Work(1, 0, 30, 1, True), Work(2, 1, 10, 4, False), Work(3, 2, 5, 3, True, 2)))
    assert Load.of(plan) == Load(8, 30, 4 * 12 + 3 * 6.5, 4, 3)


def test_a_fit_finds_what_steps_were_made_of() -> None:
    """Red when the fit mixes up what it is fitted to."""
    from quire.bench.step_costs import fit

    true = table(tokens=(1, 2, 8, 64), times=(0.010, 0.011, 0.015, 0.080), context_s=2e-6,
                 pair_s=3e-8, sample_s=5e-4)  # fmt: skip
    loads = [Load(b, b * c, 0.0, b, b) for b in (1, 2, 8) for c in (16, 256, 1024)]
    loads += [Load(n, 0, n * (s + n / 2), 1, 1) for n in (2, 8, 64) for s in (0, 512, 2048)]
    found = fit(true.engine, loads, [true.seconds(load) for load in loads])
    assert found.fit_error < 1e-6
    assert found.context_s == pytest.approx(2e-6)
    assert found.pair_s == pytest.approx(3e-8)
    assert found.sample_s == pytest.approx(5e-4)


def test_costs_are_measured_through_the_engine(tmp_path: Path) -> None:
    """Red when a probe leaves rows or pages in a state that changes what the engine answers."""
    from quire import LLM, SamplingParams
    from quire.bench.step_costs import measure_costs
    from quire.models.tiny import tiny_model

    llm = LLM(str(tiny_model("gemma3_text", tmp_path)), device="cpu", max_num_seqs=4,
              max_num_batched_tokens=32, max_model_len=128, page_size=4)  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=8)
    before = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
    measured = measure_costs(llm._engine, "tiny")
    assert measured.engine.windows == tuple(llm._engine.runner.pool.groups.windows)
    assert min(measured.times) > 0 and len(measured.points) >= 8
    llm.reset_prefix_cache()
    after = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
    assert after == before


def test_a_gpu_reads_a_shared_context_once() -> None:
    """Red when decodes behind the same pages are charged for each of them on a GPU, or once on a
    CPU, whose attention reads them for each."""
    prefix = " ".join(f"s{i}" for i in range(600))
    work = [Ask(0.0, prefix, 600, 1)]
    work += [Ask(100.0, f"{prefix} {i}a {i}b {i}c", 603, 6) for i in range(10)]
    gaps = {}
    for device in ("cpu", "h200"):
        engine = table(device=device, context_s=1e-5, max_num_seqs=16, max_num_batched_tokens=1024,
                       max_model_len=1024)  # fmt: skip
        times = simulate(SimEngine.of(engine), work).outcomes[-1].token_times
        gaps[device] = times[-1] - times[-2]
    context = 10 * 607  # a prompt and four of its answer
    assert gaps["cpu"] == pytest.approx(0.019 + 1e-5 * context)
    assert gaps["h200"] == pytest.approx(0.019 + 1e-5 * (context - 9 * 600))
