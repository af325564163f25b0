"""Batch-invariant matmul against cuBLAS: do the bits agree, and what do they cost?

For every weight shape, batch size and number of k-splits this runs a short list of tile configs,
checks each result bit for bit against one reference config on the whole batch, and times it by
graph replay over weights that rotate through more than the L2 holds. The table has one line per
number of splits, because that number is the one choice that must be fixed per shape before any
batch is known; the fastest config of each line is named by its letter in the legend.

    python benchmarks/gpu_matmul.py --max-seconds 150 --json records.json
    python benchmarks/gpu_matmul.py --compile-only        # no GPU needed: do all configs build?
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import string
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matmul_candidates import (
    CANDIDATES,
    LARGE_BATCHES,
    MIDDLE_BATCHES,
    REFERENCE,
    SHAPES,
    SMALL_BATCHES,
    SPECIALIZED,
    describe,
    split_options,
)

from quire.kernels.matmul import KernelCall, MatmulWorkspace, plan_matmul
from quire.kernels.matmul_configs import SplitPlan, TileConfig

ROTATE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Case:
    n: int
    k: int
    m: int
    splits: int
    config: TileConfig
    letter: str


@dataclass(frozen=True, slots=True)
class Record:
    case: Case
    micros: float
    wrong: int  # outputs whose bits differ from the reference


def cases_of(n: int, k: int, m: int, lists: dict[int, list[TileConfig]]) -> Iterator[Case]:
    configs = next(configs for limit, configs in lists.items() if m <= limit)
    for splits in split_options(n):
        for letter, config in zip(string.ascii_letters, configs, strict=False):
            if config.reduce in ("kernel", "park") and splits == 1:
                continue
            # Two accumulators live at once: what does not fit spills inside the loop.
            accumulators = config.block_m * config.block_n // (32 * config.num_warps)
            if config.reduce == "loop" and splits > 1 and accumulators > 64:
                continue
            yield Case(n, k, m, splits, config, letter)


def all_cases(args: argparse.Namespace) -> list[Case]:
    cases: list[Case] = []
    for model, shapes in SHAPES.items():
        if args.models and model not in args.models.split(","):
            continue
        for n, k in shapes:
            batches = SMALL_BATCHES + (LARGE_BATCHES if model == "8B" else ())
            batches += MIDDLE_BATCHES if args.batches else ()  # many: only when asked for
            for m in batches:
                if not args.batches or str(m) in args.batches.split(","):
                    cases.extend(cases_of(n, k, m, CANDIDATES))
    return cases


class CompileTarget:
    """Stands in for the device in compiling processes, so that they need no CUDA context."""

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def calls_for(
    case: Case, x: Tensor, w: Tensor, y: Tensor, space: MatmulWorkspace
) -> list[KernelCall]:
    return plan_matmul(x, w, None, y, SplitPlan.of(case.k, case.splits), case.config, space)


def host_calls(case: Case) -> list[KernelCall]:
    x = torch.empty(case.m, case.k, dtype=torch.bfloat16)  # never touched: pages stay unmapped
    w = torch.empty(case.n, case.k, dtype=torch.bfloat16)
    y = torch.empty(case.m, case.n, dtype=torch.bfloat16)
    return calls_for(case, x, w, y, MatmulWorkspace("cpu"))


def compile_case(case: Case) -> str:
    from triton.runtime import driver

    driver.set_active(CompileTarget())  # pyright: ignore[reportArgumentType]
    try:
        for call in host_calls(case):
            call.compile()
    except Exception as error:
        return f"{describe(case.config)}: {str(error)[:200]}"
    return ""


def compile_all(cases: list[Case], num_workers: int) -> None:
    """Fill Triton's disk cache from forked processes; must run before CUDA is initialised."""
    started = time.monotonic()
    unique = {str([call.layout.options for call in host_calls(case)]): case for case in cases}
    with multiprocessing.get_context("fork").Pool(num_workers) as pool:
        errors = [e for e in pool.imap_unordered(compile_case, unique.values()) if e]
    print(f"compiled {len(unique)} of {len(cases)} in {time.monotonic() - started:.0f} s")
    for error in sorted(set(errors)):
        print("  does not compile:", error)


def capture(launches: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    # Not torch.cuda.graph(): that one empties the allocator's cache each time.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            for launch in launches:
                launch()
        finally:
            graph.capture_end()
    return graph


def graph_micros(launches: list[Callable[[], object]], repeats: int) -> float:
    """Median microseconds of one launch, over replays of a graph that holds them all."""
    launches[0]()
    torch.cuda.synchronize()
    graph = capture(launches)
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(launches))
    return statistics.median(times)


def spread(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random bf16 over several orders of magnitude, so that orders of summation differ."""
    device = generator.device
    values = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    scale = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    return values * scale.exp_()


def count_different(y: Tensor, wanted: Tensor) -> int:
    return 0 if torch.equal(y, wanted) else int((y != wanted).sum().item())


class Bench:
    """Inputs shared by all cases, the reference results, and what was measured."""

    def __init__(self, device: str = "cuda") -> None:
        self.generator = torch.Generator(device).manual_seed(1)
        self.device = device
        self.space = MatmulWorkspace(device, max_partials=1 << 24)
        self.weights = torch.empty(0, dtype=torch.bfloat16, device=device)
        self.records: list[Record] = []
        self.cublas: dict[tuple[int, int, int], float] = {}
        self.errors: dict[tuple[int, int], tuple[float, float]] = {}
        self.failures: set[str] = set()

    def rotating_weights(self, n: int, k: int) -> list[Tensor]:
        copies = max(1, -(-ROTATE_BYTES // (2 * n * k)))
        if self.weights.numel() < copies * n * k:
            self.weights = spread((copies * n * k,), self.generator)
        return [w.view(n, k) for w in self.weights[: copies * n * k].split(n * k)]

    def reference(self, case: Case, x: Tensor, w: Tensor) -> Tensor:
        y = torch.empty(len(x), case.n, dtype=x.dtype, device=self.device)
        for call in calls_for(replace(case, config=REFERENCE), x, w, y, self.space):
            call.run()
        return y

    def run_group(self, cases: list[Case], x_all: Tensor) -> None:
        """All cases of one shape and batch."""
        n, k, m = cases[0].n, cases[0].k, cases[0].m
        weights = self.rotating_weights(n, k)
        # A window at a random place: rows must not care where in the batch they sit.
        place = int(torch.randint(0, len(x_all) - m + 1, ()).item())
        x = x_all[place : place + m]
        floor = max(2 * n * k / 4e6, 2 * m * n * k / 6e8)  # microseconds
        num_launches = max(1, min(max(len(weights), 16), int(4000 / floor) + 1))
        # The first weights come last, so that what a replay leaves in y can be checked too.
        turns = [weights[i % len(weights)] for i in reversed(range(num_launches))]
        y = torch.empty(m, n, dtype=x.dtype, device=self.device)
        self.cublas[n, k, m] = graph_micros([lambda w=w: F.linear(x, w) for w in turns], 3)
        expected: dict[int, Tensor] = {}
        for case in cases:
            if case.splits not in expected:
                expected[case.splits] = self.reference(case, x_all, weights[0])
                if (n, k) not in self.errors:
                    self.errors[n, k] = self.accuracy(x_all, weights[0], expected[case.splits])
            wanted = expected[case.splits][place : place + m]
            try:
                self.records.append(self.run_case(case, x, turns, y, wanted))
            except Exception as error:  # a config that does not fit must not end the run
                self.failures.add(f"{describe(case.config)}: {str(error)[:120]}")
                self.space.counters.zero_()

    def run_case(
        self, case: Case, x: Tensor, turns: list[Tensor], y: Tensor, wanted: Tensor
    ) -> Record:
        calls = [calls_for(case, x, w, y, self.space) for w in turns]
        y.fill_(float("nan"))
        for call in calls[-1]:
            call.run()
        wrong = count_different(y, wanted)
        y.fill_(float("nan"))
        micros = graph_micros([lambda c=c: [i.run() for i in c] for c in calls], 3)
        return Record(case, micros, max(wrong, count_different(y, wanted)))

    def accuracy(self, x: Tensor, w: Tensor, y: Tensor) -> tuple[float, float]:
        """Relative error of ours and of the library's, against fp64, on a few rows."""
        exact = x[:4].double() @ w.double().T
        ours = (y[:4] - exact).norm() / exact.norm()
        library = (F.linear(x[:4], w) - exact).norm() / exact.norm()
        return ours.item(), library.item()


def print_legend(lists: dict[int, list[TileConfig]]) -> None:
    print("configs m x n x k.stages.warps; s=weights first, t=tma, p=early launch, L/K/P=reduce")
    for limit, configs in lists.items():
        named = zip(string.ascii_letters, configs, strict=False)
        print(f"  M<={limit if limit < 1 << 30 else 'any'}:", end=" ")
        print(" ".join(f"{letter}={describe(config)}" for letter, config in named))


def print_table(bench: Bench) -> None:
    """Per shape: cuBLAS, then the best of each split count, then of all early launches, in us."""
    shapes = dict.fromkeys((n, k) for n, k, _ in bench.cublas)
    for n, k in shapes:
        batches = [m for a, b, m in bench.cublas if (a, b) == (n, k)]
        right = [r for r in bench.records if (r.case.n, r.case.k) == (n, k) and not r.wrong]
        ours, library = bench.errors.get((n, k), (0.0, 0.0))
        print(f"{n}x{k}".ljust(13) + "".join(f"M={m}".rjust(15) for m in batches), end="")
        print(f"   err {ours:.1e}/{library:.1e}")
        print("  cuBLAS".ljust(13) + "".join(f"{bench.cublas[n, k, m]:15.1f}" for m in batches))
        rows = {
            f"S={s}": [r for r in right if r.case.splits == s and not r.case.config.pdl]
            for s in split_options(n)
        }
        rows["early"] = [r for r in right if r.case.config.pdl]
        for name, records in rows.items():
            cells = [cell(records, m, bench.cublas[n, k, m], name == "early") for m in batches]
            if records:
                print(f"  {name}".ljust(13) + "".join(c.rjust(15) for c in cells))


def cell(records: list[Record], m: int, library: float, with_splits: bool) -> str:
    """The fastest of these at batch m, its letter, and how many times faster than cuBLAS."""
    best = min((r for r in records if r.case.m == m), key=lambda r: r.micros, default=None)
    if best is None:
        return "-"
    splits = f"/{best.case.splits}" if with_splits else ""
    return f"{best.micros:.1f}{best.case.letter}{splits} {library / best.micros:.2f}x"


def print_bits(bench: Bench) -> None:
    wrong: dict[str, int] = {}
    for record in bench.records:
        if record.wrong:
            name = f"{describe(record.case.config)} S{record.case.splits}"
            wrong[name] = wrong.get(name, 0) + 1
    print(f"bits: {len(bench.records)} results checked, {sum(wrong.values())} differ", wrong or "")
    for failure in sorted(bench.failures):
        print("failed:", failure)


def save(bench: Bench, path: str) -> None:
    if not path:
        return
    cublas = [{"n": n, "k": k, "m": m, "micros": t} for (n, k, m), t in bench.cublas.items()]
    result = {"records": [asdict(r) for r in bench.records], "cublas": cublas}
    Path(path).write_text(json.dumps(result))


def run(bench: Bench, cases: list[Case], deadline: float) -> None:
    groups: dict[tuple[int, int, int], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.n, case.k, case.m), []).append(case)
    inputs: dict[tuple[int, int], Tensor] = {}
    for (_, k, m), group in groups.items():
        if time.monotonic() > deadline:
            print("out of time: the table is partial")
            return
        rows = 256 if m <= 256 else m
        if (rows, k) not in inputs:
            inputs[rows, k] = spread((rows, k), bench.generator)
        bench.run_group(group, inputs[rows, k])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-seconds", type=float, default=150)
    parser.add_argument("--models", default="", help="of 8B, 14B, 0.6B; all by default")
    parser.add_argument("--batches", default="", help="rows of x, comma separated")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--json", default="", metavar="FILE", help="every single record")
    parser.add_argument("--specialized", action="store_true", help="also warp-specialised tiles")
    args = parser.parse_args()
    deadline = time.monotonic() + args.max_seconds
    cases = all_cases(args)
    extra: list[Case] = []
    if args.specialized:
        for n, k in SHAPES["8B"]:
            for m in LARGE_BATCHES:
                found = cases_of(n, k, m, {1 << 30: SPECIALIZED})
                extra.extend(c for c in found if c.splits == 1)
    num_workers = max(1, (os.cpu_count() or 2) - 1)
    compile_all([*cases, *(replace(c, config=REFERENCE) for c in cases), *extra], num_workers)
    if args.compile_only:
        return
    bench = Bench()
    try:
        run(bench, cases, deadline)
    except Exception as error:  # what was measured so far is still worth printing
        print("stopped:", error)
    print_legend(CANDIDATES)
    print_table(bench)
    print_bits(bench)
    save(bench, args.json)
    print(f"{deadline - time.monotonic():.0f} s left", flush=True)
    if extra:
        special = Bench()
        run(special, extra, deadline)
        print_legend({1 << 30: SPECIALIZED})
        print_table(special)
        print_bits(special)


if __name__ == "__main__":
    main()
