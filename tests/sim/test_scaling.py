"""Tables for devices and layouts that nobody measured."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.published_costs import ALL, table_of
from quire.bench.serve.work import asks, poisson_times
from quire.bench.shapes import SHAPES
from quire.cli.main import main
from quire.config import SchedConfig
from quire.errors import BadRequest, NotSupported, OutOfMemory
from quire.kv.groups import PageNeeds
from quire.models.registry import spec_of
from quire.models.tiny_configs import tiny_config
from quire.sched.cost_table import CostTable, Load
from quire.sim.devices import DEVICES, H200, Device
from quire.sim.engine import SimEngine
from quire.sim.estimate import Estimate, Layout
from quire.sim.room import pages_that_fit
from quire.sim.scaling import estimated, scaled
from quire.sim.simulate import simulate
from quire.sim.tables import FOLDER, Source, shipped_names, table_named
from tests.sim.tables import ask, table

SPEC = spec_of(SHAPES["8b"])
MIXTRAL = spec_of(tiny_config("MixtralForCausalLM"))
LOADS = [
    Load(1, 255, 0, 1, 1),
    Load(256, 65280, 0, 256, 256),
    Load(2048, 0, 2048**2 / 2, 1, 1),
    Load(8192, 9000, 1e7, 40, 40),
]


def made_on(table: CostTable, device: Device, layout: Layout) -> CostTable:
    return scaled(table, Estimate(SPEC, H200), Estimate(SPEC, device, layout), "8b")


@pytest.fixture(scope="module")
def published() -> CostTable:
    return table_named("h200-8b")


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.shape)
def test_shipped_tables_are_what_the_published_figures_give(one, tmp_path: Path) -> None:
    """Red when a shipped table is edited by hand, or the figures change and it does not."""
    table_of(one).write(tmp_path / "table.json")
    made = CostTable.read(tmp_path / "table.json")
    shipped = CostTable.read(FOLDER / f"h200-{one.shape}.json")
    assert made.times == pytest.approx(shipped.times, rel=1e-6)
    assert made.context_s == pytest.approx(shipped.context_s, rel=1e-6)
    assert made.pair_s == pytest.approx(shipped.pair_s, rel=1e-6)
    assert (made.engine, made.label, made.source) == (
        shipped.engine,
        shipped.label,
        shipped.source,
    )


def test_published_numbers_stand_in_the_docs() -> None:
    """Red when a table is fitted to a number that no page has."""
    root = Path(__file__).parents[2]
    text = "".join((root / f"docs/{n}.md").read_text() for n in ("benchmarks", "performance"))
    for one in ALL:
        told = [ms for _, _, ms in one.decodes] + list(one.sizes_ms)
        for ms in (*told, *(ms for _, ms, _ in one.prompts)):
            assert f"{ms:g}" in text or f"{ms:.2f}" in text or f"{ms:.3f}" in text, ms


def test_the_same_device_is_the_same_table(published: CostTable) -> None:
    """Red when scaling to what was measured changes it, or its label."""
    assert made_on(published, H200, Layout()) is published
    assert published.label == "published"
    assert "16 November 2026" in published.source


@pytest.mark.parametrize("name", sorted(set(DEVICES) - {"h200"}))
@pytest.mark.parametrize("layout", [Layout(), Layout(2), Layout(2, 2)], ids=str)
def test_what_was_not_measured_says_so(published: CostTable, name: str, layout: Layout) -> None:
    """Red when a scaled or estimated table passes for a measured one."""
    device = DEVICES[name]
    made = made_on(published, device, layout)
    assert made.label == "scaled" and device.source in made.source
    assert "published of 8b on h200" in made.source and not made.points
    rough = estimated(SPEC, "8b", device, layout)
    assert rough.label == "estimated" and "roofline" in rough.source
    assert (rough.engine.ranks, rough.engine.stages) == (layout.tp, layout.pp)
    for load in LOADS:
        assert made.seconds(load) > published.seconds(load) / (layout.tp * 1.05)


def with_rates(device: Device, factor: float, kind: str) -> Device:
    return replace(device, **{kind: getattr(device, kind) * factor})


@pytest.mark.parametrize("kind", ["bandwidth", "flops", "link"])
@pytest.mark.parametrize("layout", [Layout(), Layout(4), Layout(2, 2)], ids=str)
def test_a_faster_device_is_never_slower(published: CostTable, kind: str, layout: Layout) -> None:
    """Red when a rate is divided by where it should multiply."""
    slow = with_rates(DEVICES["h100"], 0.5, kind)
    for now, faster in pairwise([slow, DEVICES["h100"], with_rates(DEVICES["h100"], 3.0, kind)]):
        for load in LOADS:
            for make in (
                lambda device: made_on(published, device, layout),
                lambda device: estimated(SPEC, "8b", device, layout),
            ):
                before, after = make(now), make(faster)
                assert after.seconds(load) <= before.seconds(load)
                assert after.hop_seconds(load) <= before.hop_seconds(load)


def test_simulations_on_faster_memory_end_sooner(published: CostTable) -> None:
    """Red when a table's numbers do not reach the clock."""
    work = asks(poisson_times(30, 20.0, 1, 0), [(200, 40)] * 30, 0)
    ends = []
    for factor in (0.5, 1.0, 2.0):
        device = with_rates(H200, factor, "bandwidth")
        engine = SimEngine.of(made_on(published, device, Layout()))
        ends.append(simulate(engine, work).outcomes)
    for slower, faster in pairwise(ends):
        assert all(b.ended < a.ended for a, b in zip(slower, faster, strict=True))


def test_ranks_share_bytes_and_wait_for_each_other(published: CostTable) -> None:
    """Red when ranks are free, or worth nothing: eight of them read an eighth of the weights."""
    one = Estimate(SPEC, H200)
    eight = Estimate(SPEC, H200, Layout(8))
    layers = SPEC.num_layers * 14e-6
    assert eight.base_s(1) - layers == pytest.approx((one.base_s(1) - layers) / 8, rel=0.01)
    assert eight.context_s == pytest.approx(one.context_s / 8)
    assert eight.pair_s == pytest.approx(one.pair_s / 8)
    # Four gathers a layer, and 2 * 4096 + 4096 + 14336 bf16 numbers of each token and layer.
    arrives = 100 * 32 * 2 * (3 * 4096 + 14336) * 7 / 8
    assert eight.gather_s(100) == pytest.approx(4 * 32 * H200.link_s + arrives / H200.link)
    assert Estimate(SPEC, H200, Layout(16)).context_s == eight.context_s  # 8 heads of keys


def test_stages_work_on_several_steps_at_once() -> None:
    """Red when a stage waits for the whole step before, or a request's tokens overtake each other:
    a step of 10 ms is 5 on each of two stages; two requests alternate, one alone gains nothing."""
    flat = {"tokens": (1, 2), "times": (0.010, 0.010), "max_num_seqs": 1}
    whole = table(**flat)
    halves = table(**flat, stages=2)
    alone = [ask(0.0, 1, 21)]
    ends = [simulate(SimEngine.of(t), alone).seconds for t in (whole, halves)]
    assert ends == pytest.approx([0.210, 0.210])
    chunks = {"max_num_seqs": 8, "max_num_batched_tokens": 8}
    long = [ask(0.0, 160, 1)]  # 20 chunks, which need no token of each other
    ends = [simulate(SimEngine.of(table(**flat | chunks, stages=n)), long).seconds for n in (1, 2)]
    first, *rest = ends
    assert rest[0] < 0.6 * first
    hops = table(**flat, stages=2, hop_s=0.003)
    assert simulate(SimEngine.of(hops), alone).seconds == pytest.approx(21 * 0.013)


def test_experts_are_spread_over_ranks() -> None:
    """Red when every rank reads every expert."""
    whole = Estimate(MIXTRAL, H200).shares
    halves = Estimate(MIXTRAL, H200, Layout(2)).shares
    assert whole.experts == 1.0 and halves.experts == 0.5


def test_what_does_not_fit_is_refused(published: CostTable) -> None:
    """Red when a model is simulated on devices that cannot hold it."""
    sched = SchedConfig(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096)
    large = spec_of(SHAPES["14b"])
    with pytest.raises(OutOfMemory, match="weights"):
        pages_that_fit(Estimate(large, DEVICES["rtx4090"]), sched, 16)
    two = pages_that_fit(Estimate(large, DEVICES["rtx4090"], Layout(2)), sched, 16)
    staged = pages_that_fit(Estimate(large, DEVICES["rtx4090"], Layout(1, 2)), sched, 16)
    assert two > 256 and staged > 256
    with pytest.raises(NotSupported, match="64 ranks"):
        Layout(64).check(SPEC)
    with pytest.raises(NotSupported, match="33 stages"):
        Layout(1, 33).check(SPEC)


def test_pages_are_what_the_engine_would_have(published: CostTable) -> None:
    """Red when memory is counted otherwise than by the roofline's bytes: 2 MiB a page of the 8B
    shape, and 15 GiB of weights, of nine tenths of the memory."""
    page, weights = 2 << 20, 8_030_000_000 * 2
    room = 0.9 * H200.memory - weights
    assert room * 0.96 / page < published.engine.num_pages < room / page


def test_a_table_of_one_model_is_scaled_to_another() -> None:
    """Red when a table passes for one of another model, or is scaled without its label."""
    large = Source.of("h200-8b", "14b", None).on(None, Layout())
    known = table_named("h200-14b")
    assert (large.label, large.engine.model) == ("scaled", "14b")
    assert large.engine.max_model_len == 40960
    errors = [abs(large.seconds(one.load) / one.seconds - 1) for one in known.points]
    assert sum(errors) / len(errors) < 0.15
    assert Source.of("h200-8b", "8b", None).on(None, Layout()) == table_named("h200-8b")


def test_windows_are_those_of_the_engine(tmp_path: Path) -> None:
    """Red when pages of layers with windows are counted otherwise than the engine groups them: six
    layers of which every third sees all are three groups of two."""
    config = tiny_config("Gemma3ForCausalLM")
    spec = replace(spec_of(config), num_layers=6, windows=(64, 64, None) * 2)
    made = estimated(spec, "tiny", H200, Layout())
    assert made.engine.windows == (None, 64, 64)
    sched = SchedConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=1024)
    # All that four requests could ever hold is less than the memory.
    pages = pages_that_fit(Estimate(spec, H200), sched, 16)
    assert pages == 4 * PageNeeds(16, (None, 64, 64)).of(1024) + 1


def test_sources_say_what_they_lack(tmp_path: Path) -> None:
    """Red when a table of an unknown device or model is scaled all the same."""
    path = tmp_path / "costs.json"
    table().write(path)
    with pytest.raises(BadRequest, match="--shape"):
        Source.of(str(path), None, None).on(H200, Layout())
    with pytest.raises(BadRequest, match="--table-device"):
        Source.of(str(path), "8b", None).on(H200, Layout())
    assert Source.of(str(path), None, None).on(None, Layout()) == table()
    with pytest.raises(BadRequest, match="h200-8b"):
        table_named("h300-8b")
    assert shipped_names() == ["h200-0.6b", "h200-14b", "h200-8b"]


def test_command_labels_its_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Red when a prediction does not say what it rests on."""
    words = ["simulate", "h200-8b", "--rate", "5", "--requests", "10"]
    labels = []
    for more in ([], ["--device", "l40s", "--max-model-len", "4096"]):
        assert main([*words, *more]) == 0
        out = capsys.readouterr().out
        record = json.loads(out.splitlines()[-1])
        labels.append(record["costs"])
        assert record["costs_source"] in out.partition('{"what"')[0]
    assert labels == ["published", "scaled"]
    rough = ["simulate", "roofline", "--shape", "14b", "--device", "h100", "-tp", "2"]
    assert main([*rough, "--rate", "5", "--requests", "10"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["costs"] == "estimated"
    assert "ranks on several GPUs is known" in out
    assert main([*words, "--device", "rtx4090"]) == 1
    assert "max_model_len=131072" in capsys.readouterr().err
