"""Batch-invariant matmul beside the vendor's library: do the bits agree, and which is faster?

For every weight shape and batch size: the library without split-k, a short list of tiles of our
kernel, and on Hopper the streamed product, if `pick_stream` has portions for it. Each result is
compared bit for bit with one reference tile on a larger batch, and timed by graph replay over
weights that rotate through more than the L2 holds. A line shows the library, the best tile, the one
`pick_config` picks, the streamed product, who is chosen of them, and the results that differ. What
streaming gains shows between other kernels, in whole steps, rather than here.

    python -m benchmarks.gpu_matmul --models 8B --max-seconds 150 --json records.json
    python -m benchmarks.gpu_matmul --gated            # with silu(gate) * up: products of n / 2
    python -m benchmarks.gpu_matmul --compile-only     # no GPU needed: do all tiles build?
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.matmul_candidates import BATCHES, REFERENCE, SHAPES, candidates, describe
from quire.kernels.chip import H200
from quire.kernels.hopper import has_hopper_kernels
from quire.kernels.matmul import KernelCall, plan_matmul
from quire.kernels.matmul_configs import TileConfig, pick_config
from quire.kernels.silu_mul import silu_mul
from quire.kernels.stream_configs import MOST_ROWS, pick_stream
from quire.kernels.vendor_matmul import forbid_split_k, is_faster, vendor_matmul

ROTATE_BYTES = 256 << 20
STREAM = "stream"
SHARED_BYTES = 227 << 10  # what a program may have on an H200


@dataclass(frozen=True, slots=True)
class Product:
    n: int
    k: int
    m: int
    gated: bool

    def out(self, device: str) -> Tensor:
        width = self.n // 2 if self.gated else self.n
        return torch.full((self.m, width), float("nan"), dtype=torch.bfloat16, device=device)

    def call(self, x: Tensor, w: Tensor, out: Tensor, config: TileConfig) -> KernelCall:
        return plan_matmul(x, w, None, out, config, "silu" if self.gated else None)


@dataclass(frozen=True, slots=True)
class Record:
    product: Product
    way: str  # "library" or the tile
    micros: float
    wrong: int  # outputs whose bits are not the reference's


# ------------------------------------------------------------ compiling


class CompileTarget:
    """Stands in for the device in compiling processes, so that they need no CUDA context."""

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def host_call(product: Product, config: TileConfig) -> KernelCall:
    """The launch as it will be on the device, with tensors that no one touches."""
    x = torch.empty(product.m, product.k, dtype=torch.bfloat16)
    w = torch.empty(product.n, product.k, dtype=torch.bfloat16)
    width = product.n // 2 if product.gated else product.n
    call = product.call(x, w, torch.empty(product.m, width, dtype=torch.bfloat16), config)
    early = {"EARLY": True, "launch_pdl": True}  # whatever the machine that compiles
    return replace(call, layout=replace(call.layout, options={**call.layout.options, **early}))


def become_compiler() -> None:
    from triton.runtime import driver

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing here may open a context
    driver.set_active(CompileTarget())


def compile_one(task: tuple[Product, TileConfig]) -> str:
    product, config = task
    try:
        kernel = host_call(product, config).compile()
    except Exception as error:  # a tile that does not build must not hide the others
        return f"{describe(config)} does not compile: {str(error)[:200]}"
    shared = kernel.metadata.shared
    return f"{describe(config)} wants {shared:,} bytes" if shared > SHARED_BYTES else ""


def compile_all(products: list[Product]) -> list[str]:
    """Fill Triton's disk cache from forked processes; returns what went wrong."""
    started = time.monotonic()
    tasks = {}
    for product in products:
        for config in (REFERENCE, *candidates(product.m, product.n, product.k)):
            # Compiled code does not depend on sizes, only on whether k fills the tiles.
            key = (config, product.gated, product.k % config.block_k == 0)
            tasks.setdefault(key, (replace(product, m=min(product.m, 64)), config))
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), become_compiler) as pool:
        errors = [error for error in pool.imap_unordered(compile_one, tasks.values()) if error]
    print(
        f"compiled {len(tasks) - len(errors)} of {len(tasks)} in {time.monotonic() - started:.0f} s"
    )
    return sorted(errors)


# ------------------------------------------------------------ timing


def graph_micros(launches: list[Callable[[], object]], repeats: int = 3) -> float:
    """Median microseconds of one launch, over replays of a graph that holds them all."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph(): that one empties the allocator's cache each time.
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            for launch in launches:
                launch()
        finally:
            graph.capture_end()
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


def spread(shape: tuple[int, ...]) -> Tensor:
    """Random bf16 over several orders of magnitude, so that orders of summation differ."""
    values = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    return values.mul_(torch.randn(shape, dtype=torch.bfloat16, device="cuda").exp_())


class Inputs:
    """Rows and weights, kept from one product to the next."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self._weights = torch.empty(0, dtype=torch.bfloat16, device="cuda")
        self._rows: dict[tuple[int, int], Tensor] = {}

    def weights(self, n: int, k: int) -> list[Tensor]:
        copies = max(1, -(-ROTATE_BYTES // (2 * n * k)))
        if self._weights.numel() < copies * n * k:
            self._weights = spread((copies * n * k,))
        return [w.view(n, k) for w in self._weights[: copies * n * k].split(n * k)]

    def rows(self, m: int, k: int) -> Tensor:
        key = (256 if m <= 256 else m, k)
        if key not in self._rows:
            self._rows[key] = spread(key)
        return self._rows[key]


def measure(product: Product, inputs: Inputs) -> list[Record]:
    n, k, m = product.n, product.k, product.m
    weights, x_all = inputs.weights(n, k), inputs.rows(m, k)
    # A window at a random place: rows must not care where in the batch they sit.
    place = int(torch.randint(0, len(x_all) - m + 1, ()).item())
    x, y = x_all[place : place + m], product.out("cuda")
    whole = replace(product, m=len(x_all))
    reference = whole.out("cuda")
    whole.call(x_all, weights[0], reference, REFERENCE).run()
    wanted = reference[place : place + m]
    floor = max(2 * n * k / 4e6, 2 * m * n * k / 6e8)  # microseconds
    num_launches = max(1, min(max(len(weights), 16), int(4000 / floor) + 1))
    # The first weights come last: what a replay leaves behind is compared.
    turns = [weights[i % len(weights)] for i in reversed(range(num_launches))]
    dense = torch.empty(m, n, dtype=x.dtype, device="cuda")

    def by_library(w: Tensor) -> Tensor:
        out = vendor_matmul(x, w, None, dense)
        return silu_mul(out, interleaved=True) if product.gated else out

    def by_tile(config: TileConfig, w: Tensor) -> Tensor:
        product.call(x, w, y, config).run()
        return y

    ways = {describe(config): partial(by_tile, config) for config in candidates(m, n, k)}
    ways = {"library": by_library, **streamed(product, x, y, weights), **ways}
    records = []
    for name, way in ways.items():
        y.fill_(float("nan"))
        got = way(weights[0])
        micros = graph_micros([partial(way, w) for w in turns])
        wrong = 0 if torch.equal(got, wanted) else int((got != wanted).sum().item())
        records.append(Record(product, name, micros, wrong))
    return records


def streamed(
    product: Product, x: Tensor, y: Tensor, weights: list[Tensor]
) -> dict[str, Callable[[Tensor], Tensor]]:
    """The streamed product by name, where there is one."""
    few = product.m <= MOST_ROWS and has_hopper_kernels(x.device)
    config = pick_stream(product.m, product.n, product.k, product.gated, H200) if few else None
    if config is None:
        return {}
    from quire.kernels.stream_matmul import StreamMatmul

    gate = "silu" if product.gated else None
    products = {w.data_ptr(): StreamMatmul(w, None, gate) for w in weights}

    def by_stream(w: Tensor) -> Tensor:
        products[w.data_ptr()](x, y, config)
        return y

    return {STREAM: by_stream}


# ------------------------------------------------------------ the table

HEADER = (
    f"{'weight':>13}{'rows':>6}{'library':>9}{'best':>9}{'picked':>9}{'stream':>9}"
    "  chosen         best tile"
)


def line(records: list[Record]) -> str:
    """One product: microseconds of the library, of the best tile, of the one we pick, streamed."""
    product = records[0].product
    micros = {record.way: record.micros for record in records}
    library, stream = micros.pop("library"), micros.pop(STREAM, None)
    best = min(micros, key=micros.__getitem__)
    picked = micros[describe(pick_config(product.m, product.n, product.k, H200))]
    asks = is_faster(product.m, product.n, product.k, product.gated, H200.units)
    chosen = "library" if asks else "ours"
    regret = (library if asks else picked) / min(library, picked) - 1
    if stream is not None:
        chosen, regret = STREAM, stream / min(library, picked, stream) - 1
    wrong = [f"{record.way} ({record.wrong})" for record in records if record.wrong]
    return (
        f"{product.n:>7}x{product.k:<5}{product.m:>6}{library:9.1f}{micros[best]:9.1f}{picked:9.1f}"
        f"{'-' if stream is None else f'{stream:.1f}':>9}"
        f"  {chosen}{f' +{regret:.0%}' if regret > 0.02 else ''}".ljust(68)
        + f"  {best}  "
        + (f"BITS DIFFER: {', '.join(wrong)}" if wrong else "bits agree")
    )


def run(products: list[Product], max_seconds: float) -> list[Record]:
    forbid_split_k()
    deadline = time.monotonic() + max_seconds
    inputs, everything = Inputs(), []
    print(HEADER)
    for product in products:
        if time.monotonic() > deadline:
            print("out of time: the table is partial")
            break
        records = measure(product, inputs)
        print(line(records), flush=True)
        everything += records
    differ = sum(record.wrong > 0 for record in everything)
    print(f"{len(everything)} results compared, {differ} differ")
    return everything


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(SHAPES), help="of %(default)s")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="rows of x")
    parser.add_argument("--gated", action="store_true", help="gate and up products with their gate")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--max-seconds", type=float, default=150)
    parser.add_argument("--json", default="", metavar="FILE", help="every single record")
    args = parser.parse_args()
    products = [
        Product(n, k, int(m), args.gated)
        for model in args.models.split(",")
        for n, k in (SHAPES[model][2:3] if args.gated else SHAPES[model])
        for m in args.batches.split(",")
    ]
    errors = compile_all(products)
    print(*errors, sep="\n", end="\n" if errors else "")
    if errors or args.compile_only:
        return 1 if errors else 0
    records = run(products, args.max_seconds)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(record) for record in records]))
    return 1 if any(record.wrong for record in records) else 0


if __name__ == "__main__":
    raise SystemExit(main())
