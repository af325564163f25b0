"""The tables of step times that `quire simulate` brings along: fitted to what the docs publish.

    python -m benchmarks.published_costs            writes quire/sim/published/*.json
    python -m benchmarks.published_costs --check    predicts rows of the suite the fit has not seen

Every number here stands in docs/benchmarks.md or docs/performance.md, where its command is. Decodes
of the suite have 255 tokens behind them in the mean. Sizes of batches that no graph has are left
out: such a batch takes the next larger graph.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, permutations
from pathlib import Path

import msgspec

from benchmarks.gpu_shapes import COMMON
from benchmarks.gpu_shapes import SHAPES as EXPERTS
from quire.bench.serve.work import Ask
from quire.bench.shapes import SHAPES
from quire.bench.step_costs import fit
from quire.bench.suite import OWN_TOKENS, Row, h200_suite, request_lengths
from quire.bench.workload import percentile
from quire.cli.show import print_table
from quire.models.registry import spec_of
from quire.params import SamplingParams
from quire.request import Request
from quire.sched.cost_table import PUBLISHED, CostTable, EngineFacts, Load, Point
from quire.sim.devices import H200
from quire.sim.engine import Node, SimEngine
from quire.sim.estimate import Estimate, Layout
from quire.sim.room import pages_that_fit
from quire.sim.scaling import estimated, scaled
from quire.sim.simulate import simulate

FOLDER = Path(__file__).parents[1] / "quire" / "sim" / "published"
SOURCE = "the suite of 16 November 2026, one H200, bf16: docs/benchmarks.md and docs/performance.md"
MIDDLE = 255  # tokens behind a decode of the suite
SIZES = (128, 144, 160, 176, 200, 216, 256, 272, 304, 336, 384, 432, 464, 512)  # of decode graphs
SIZES_CONTEXT = 130
# `schedule` and `commit` of 256 requests: 0.59 ms, docs/benchmarks.md.
HOST_WORK_S = 0.59e-3 / 256
# Attention of a prompt of 8,192 tokens takes 41.51 ms of an 8B step, docs/performance.md.
PAIR_S_8B = 41.51e-3 / (8192 * 8192 / 2)
# What drawing takes is in the steps of decodes; no published figure tells it apart.
DRAWN = 0


@dataclass(frozen=True, slots=True)
class Published:
    shape: str
    max_model_len: int
    decodes: Sequence[tuple[int, int, float]]  # requests, tokens behind each, ms
    sizes_ms: Sequence[float] = ()  # a step of SIZES at SIZES_CONTEXT
    prompts: Sequence[tuple[int, float, float]] = ()  # tokens of one prompt, ms, of it attention
    # A step of 8,192 tokens, mostly prompts of 100 to 1,024 tokens, in the throughput row.
    full_step_ms: float | None = None


SHAPES_8B = Published(
    "8b",
    131072,
    decodes=(
        *((1, MIDDLE, 3.834), (8, MIDDLE, 3.916), (32, MIDDLE, 4.289)),
        *((128, MIDDLE, 6.132), (256, MIDDLE, 9.832)),
        *((8, 32047, 11.01), (1, 128047, 7.876), (8, 32000, 11.796), (1, 128000, 7.930)),
    ),
    sizes_ms=(
        *(5.31, 5.45, 5.65, 6.17, 6.40, 6.76, 7.68, 8.20, 8.54, 8.97, 10.55, 10.81, 11.40, 12.82),
    ),
    prompts=((512, 12.61, 0.16), (2048, 47.52, 3.09), (8192, 209.2, 41.51)),
)
SHAPES_14B = Published(
    "14b",
    40960,
    decodes=(
        *((1, MIDDLE, 6.775), (64, MIDDLE, 8.432)),
        *((128, 850, 13.414), (256, 850, 22.005)),
    ),
    sizes_ms=(
        *(9.70, 9.86, 10.69, 10.99, 10.91, 11.34, 13.38, 13.04),
        *(14.68, 15.18, 18.48, 19.25, 22.58, 25.06),
    ),
    full_step_ms=6330 / 18,
)
SHAPES_06B = Published(
    "0.6b",
    40960,
    decodes=(
        *((1, MIDDLE, 0.6923), (32, MIDDLE, 0.9897), (256, MIDDLE, 3.307)),
        *((64, 850, 2.341), (128, 850, 3.966), (256, 850, 7.207)),
    ),
    full_step_ms=340 / 19,
)
ALL = (SHAPES_8B, SHAPES_06B, SHAPES_14B)


def table_of(published: Published) -> CostTable:
    spec = spec_of(SHAPES[published.shape])
    loads = [Load(n, n * context, 0.0, DRAWN, n) for n, context, _ in published.decodes]
    times = [ms / 1e3 for _, _, ms in published.decodes]
    sizes = SIZES[: len(published.sizes_ms)]
    loads += [Load(n, n * SIZES_CONTEXT, 0.0, DRAWN, n) for n in sizes]
    times += [ms / 1e3 for ms in published.sizes_ms]
    for tokens, ms, attention in published.prompts:  # as it is, and as if nobody attended
        loads += [Load(tokens, 0, tokens**2 / 2, DRAWN, 1), Load(tokens, 0, 0.0, DRAWN, 1)]
        times += [ms / 1e3, (ms - attention) / 1e3]
    source = SOURCE
    if published.full_step_ms is not None:
        for load, seconds in full_steps(published):
            loads.append(load)
            times.append(seconds)
        source += "; attention of its prompts by operations from the 8B's"
    facts = EngineFacts(
        model=published.shape,
        device=H200.name,
        ranks=1,
        overlaps=True,
        max_num_seqs=512,
        max_num_batched_tokens=8192,
        max_model_len=published.max_model_len,
        page_size=16,
        num_pages=0,
        windows=(None,),
        token_bytes=Estimate(spec, H200).token_bytes,
    )
    table = fit(facts, loads, times, 0.0, HOST_WORK_S)
    table = msgspec.structs.replace(table, label=PUBLISHED, source=source)
    pages = pages_that_fit(Estimate(spec, H200), SimEngine.of(table).sched, facts.page_size)
    return msgspec.structs.replace(table, engine=msgspec.structs.replace(facts, num_pages=pages))


def full_steps(published: Published) -> list[tuple[Load, float]]:
    """The throughput row's step, and one of a single prompt, which has more pairs to attend."""
    assert published.full_step_ms is not None
    spec, known = spec_of(SHAPES[published.shape]), spec_of(SHAPES["8b"])
    work = spec.num_layers * spec.num_heads * spec.head_dim
    pair_s = PAIR_S_8B * work / (known.num_layers * known.num_heads * known.head_dim)
    mean, squares = (100 + 1024) / 2, (100**2 + 100 * 1024 + 1024**2) / 3
    prompts = 8192 / mean
    pairs, seconds = prompts * squares / 2, published.full_step_ms / 1e3
    one = 8192 * 8192 / 2
    return [
        (Load(8192, 0, pairs, DRAWN, round(prompts)), seconds),
        (Load(8192, 0, one, DRAWN, 1), seconds + (one - pairs) * pair_s),
    ]


# ------------------------------------------------------------ predictions


def predicted(row: Row, table: CostTable) -> float:
    """Output tokens a second of a throughput row, all requests there at the start."""
    engine = SimEngine.of(table)
    if row.kind == "prefix":
        sizes = [(row.prompt + OWN_TOKENS, row.output)] * row.requests
        shared = [f"s{i}" for i in range(row.prompt)]
    else:
        sizes, shared = request_lengths(row, 0), []
    work = [Ask(0.0, " ".join(shared + [f"w{i}" for i in range(8)]), 0, 1)] if shared else []
    for number, (prompt, output) in enumerate(sizes):
        own = [f"{number}.{i}" for i in range(prompt - len(shared))]
        work.append(Ask(0.0, " ".join(shared + own), prompt, output))
    if shared:  # in the cache when the clock starts
        begin = simulate(engine, work[:1]).seconds
        work = work[:1] + [replace(one, at=2 * begin) for one in work[1:]]
    done = simulate(engine, work)
    begun = work[-1].at
    return sum(one.num_output for one in work if one.at == begun) / (done.seconds - begun)


def steps_with_prompts(table: CostTable) -> tuple[float, float]:
    """Mean and 95th percentile from step to step, ms, of `benchmarks/gpu_mixed_steps.py`'s traffic:
    64 requests decode, and before every second step a prompt of 60 to 400 tokens arrives."""
    node, draw, ids = Node(SimEngine.of(table)), random.Random(0), count()

    def send(num_prompt: int, num_output: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        prompt = [draw.randrange(1, 100_000) for _ in range(num_prompt)]
        node.send(Request.new(next(ids), prompt, params), node.clock.now)

    for _ in range(64):
        send(128, 400)
    for _ in range(8):
        node.step()
    gaps = []
    for step in range(240):
        if step % 2 == 0:
            send(draw.randint(60, 400), 6)
        before = node.clock.now
        node.step()
        gaps.append(1e3 * (node.clock.now - before))
    return sum(gaps) / len(gaps), percentile(gaps, 0.95)


# Mean and 95th percentile, docs/benchmarks-h200.md.
STEPS_MEASURED = {"8b": (7.86, 13.5), "0.6b": (1.92, 2.56)}
MEASURED = {"mixed-8b": 12676, "prefix-8b": 15946, "nano-0.6b": 28280, "nano-14b": 6543}


# Decode steps of batches 1, 32 and 128 at some 160 tokens, ms, docs/benchmarks-h200.md.
EXPERTS_MEASURED = {
    "mixtral-8x7b": (7.12, 22.8, 29.3),
    "qwen3-30b-a3b": (3.10, 14.2, 17.3),
    "deepseek-v2-lite": (2.73, 8.75, 9.84),
}


def scaled_rows() -> list[tuple[str, float | str, str, str]]:
    """What a table of one model, scaled to another, says of the other's steps."""
    rows: list[tuple[str, float | str, str, str]] = []
    tables = {one.shape: table_of(one) for one in ALL}
    for old, new in permutations(tables, 2):
        was, now = (Estimate(spec_of(SHAPES[shape]), H200) for shape in (old, new))
        made = scaled(tables[old], was, now, new)
        rows.append((f"{new}, scaled from {old}", "-", errors_of(made, tables[new].points), "-"))
    return rows


def errors_of(made: CostTable, points: Sequence[Point]) -> str:
    errors = [made.seconds(point.load) / point.seconds - 1 for point in points]
    mean = sum(map(abs, errors)) / len(errors)
    return f"{min(errors):+.0%} to {max(errors):+.0%}, mean {mean:.0%} of {len(errors)} steps"


def roofline_rows() -> list[tuple[str, float | str, str, str]]:
    """What the roofline alone says of steps that were measured."""
    rows: list[tuple[str, float | str, str, str]] = []
    for one in ALL:
        made = estimated(spec_of(SHAPES[one.shape]), one.shape, H200, Layout())
        told = errors_of(made, table_of(one).points)
        rows.append((f"{one.shape}, roofline alone", "-", told, "-"))
    for name, measured in EXPERTS_MEASURED.items():
        made = estimated(spec_of({**COMMON, **EXPERTS[name]}), name, H200, Layout())
        for batch, ms in zip((1, 32, 128), measured, strict=True):
            said = 1e3 * made.seconds(Load(batch, batch * 160, 0.0, DRAWN, batch))
            title = f"{name}, batch {batch}, roofline alone, ms"
            rows.append((title, ms, f"{said:.2f}", f"{said / ms:.2f}"))
    return rows


def check() -> None:
    tables = {one.shape: table_of(one) for one in ALL}
    rows: list[tuple[str, float | str, object, str]] = []
    for row in h200_suite().rows:
        if row.name in MEASURED:
            said, real = predicted(row, tables[row.shape]), MEASURED[row.name]
            rows.append((row.title, real, round(said), f"{said / real:.2f}"))
    for shape, measured in STEPS_MEASURED.items():
        for what, real, said in zip(
            ("mean", "95 %"), measured, steps_with_prompts(tables[shape]), strict=True
        ):
            title = f"{shape}, steps with prompts among decodes, {what}, ms"
            rows.append((title, real, f"{said:.2f}", f"{said / real:.2f}"))
    rows += scaled_rows() + roofline_rows()
    errors = {shape: round(table.fit_error, 4) for shape, table in tables.items()}
    print_table(("row", "measured", "predicted", "ratio"), rows)
    print(json.dumps({"what": "published costs", "fit_error": errors, "rows": rows}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="predict, and write nothing")
    if parser.parse_args().check:
        return check()
    FOLDER.mkdir(exist_ok=True)
    for one in ALL:
        table_of(one).write(FOLDER / f"h200-{one.shape}.json")
    return None


if __name__ == "__main__":
    main()
