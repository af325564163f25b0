"""Streamed products of packed weights on Hopper: bits, and microseconds by each kernel that can.

A line is a weight, a number of rows and the sizes that are picked for a kernel: `turns`, where two
groups take turns at a sum, or `together`. The one that products take comes first and is marked.
Times are of graph replays over copies that the L2 does not hold. Bits are compared with the dense
kernel's. `--sweep` times other sizes too, `--dense` products with the weight in bf16. The last
lines add up an 8B model's layer: by what is taken, by the fastest sizes seen, and in bf16. Exits
with 1 where a bit differs.

    python -m benchmarks.gpu_stream_packed --max-seconds 40
    python -m benchmarks.gpu_stream_packed --rows 64,128 --sweep
    python -m benchmarks.gpu_stream_packed --form 2:4 --rows 1,32,16,64,256 --sweep --dense
"""

from __future__ import annotations

import argparse
import time
from dataclasses import astuple, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_matmul import ROTATE_BYTES, graph_micros, spread
from benchmarks.gpu_packed import FORMS
from quire.kernels.matmul import Layouts, PreparedMatmul, interleave, matmul
from quire.kernels.rehearsal import rehearsal
from quire.kernels.slabs import Slabs
from quire.kernels.stream_packed import StreamPacked
from quire.kernels.stream_packed_configs import StreamPackedConfig
from quire.kernels.stream_sparse import StreamSparse
from quire.kernels.stream_sparse_configs import sparse_bytes
from quire.ops.packed_linear import streamed
from quire.ops.slabs_of import slabs_of

# Outputs, inputs, and whether there is a gate: an 8B model's, then small ones.
SHAPES = (
    (4096, 14336, False), (4096, 4096, False), (6144, 4096, False), (28672, 4096, True),
    (4096, 1024, False), (1024, 3072, False),
)  # fmt: skip
ROWS = (1, 32, 16, 256, 64, 128)


class Product:
    def __init__(self, form: str, n: int, k: int, gated: bool) -> None:
        weight = FORMS[form](n, k, "cuda")
        slabs = slabs_of(weight, gated, torch.bfloat16)
        assert slabs is not None and slabs.form.lanes, f"{form} is not streamed"
        dense = weight.dequantize().bfloat16()
        self.dense = interleave(dense) if gated else dense
        self.gate = "silu" if gated else None
        self.name = f"{n}x{k}" + " gated" * gated
        self.shape, self.is_sparse = (n, k), slabs.form.kind == "2:4"
        self.copies = [_product(each, self.gate) for each in _copies(slabs)]
        self.x = spread((max(ROWS), k)) * k**-0.5

    @property
    def first(self) -> StreamPacked | StreamSparse:
        return self.copies[0]

    def out(self, rows: int) -> Tensor:
        n = len(self.dense)
        return torch.full(
            (rows, n // 2 if self.gate else n), torch.nan, dtype=torch.bfloat16, device="cuda"
        )

    def wanted(self, rows: int) -> Tensor:
        return matmul(self.x[:rows], self.dense, gate=self.gate)

    def run(self, rows: int, config: StreamPackedConfig) -> Tensor:
        out = self.out(rows)
        self.first(self.x[:rows], out, config)
        return out

    def micros(self, rows: int, config: StreamPackedConfig) -> float:
        x, out = self.x[:rows], self.out(rows)
        return graph_micros([partial(copy, x, out, config) for copy in self.copies], 5)

    def dense_product(self, w: Tensor) -> PreparedMatmul:
        return PreparedMatmul(w, None, Layouts(), self.gate)

    def dense_micros(self, rows: int) -> float:
        count = max(1, -(-ROTATE_BYTES // (2 * self.dense.numel())))
        weights = [self.dense] + [self.dense.clone() for _ in range(count - 1)]
        products = [self.dense_product(w) for w in weights]
        return graph_micros([partial(product, self.x[:rows]) for product in products], 5)


@dataclass(frozen=True, slots=True)
class Line:
    product: Product
    rows: int
    config: StreamPackedConfig
    role: str  # "taken", "can" or "sweep"


def _copies(slabs: Slabs) -> list[Slabs]:
    count = max(1, -(-ROTATE_BYTES // slabs.num_bytes))
    return [slabs, *(_copy(slabs) for _ in range(count - 1))]


def _copy(slabs: Slabs) -> Slabs:
    values = None if slabs.values is None else slabs.values.clone()
    return replace(slabs, codes=slabs.codes.clone(), values=values)


def _product(slabs: Slabs, gate: str | None) -> StreamPacked | StreamSparse:
    product = streamed(slabs, None, gate)
    assert product is not None
    return product


def lines_of(products: list[Product], rows: int, sweep: bool) -> list[Line]:
    lines: list[Line] = []
    for product in products:
        ways = product.first.ways(rows)
        lines += [Line(product, rows, way, "can" if i else "taken") for i, way in enumerate(ways)]
        sizes = sparse_sizes(product, rows) if product.is_sparse else other_sizes(rows, ways[0])
        others = dict.fromkeys(sizes if sweep else ())
        lines += [Line(product, rows, way, "sweep") for way in others if way not in ways]
    return lines


def other_sizes(rows: int, taken: StreamPackedConfig) -> list[StreamPackedConfig]:
    """Sizes that nobody timed yet."""
    if 64 < rows <= 128:
        slabs = 1 if taken.rows > 64 else 2
        return [replace(taken, block_m=128, slabs=slabs), replace(taken, block_m=128, slabs=1)]
    if 32 < rows <= 64 and taken.tile <= 64:
        return [replace(taken, slabs=2, num_stages=4, in_turns=True)]
    return []


# Of 2:4 weights: (weight rows of a program, slabs of a stage, stages), in turns and together.
_NARROW_TURNS = ((4, 8), (4, 6), (4, 4), (2, 12), (2, 8), (2, 6), (2, 4), (1, 8))
_NARROW = ((32, 2, 3), (64, 4, 3), (64, 2, 3), (64, 2, 2))
_WIDE = (
    *((56, 2, 2), (56, 1, 4), (56, 4, 2), (64, 2, 2), (64, 2, 3), (64, 4, 2), (64, 1, 4)),
    *((128, 2, 2), (128, 1, 3), (128, 1, 4), (128, 4, 2)),
)
_MANY = ((64, 1, 2), (64, 1, 3), (64, 2, 2), (64, 2, 3), (128, 1, 2), (128, 1, 3), (128, 2, 2))


def sparse_sizes(product: Product, rows: int) -> list[StreamPackedConfig]:
    """Other sizes of a 2:4 weight that fit it and the chip."""
    taken = product.first.pick(rows)
    (n, k), is_wide = product.shape, product.shape[0] > 20_000
    if n * k < 1 << 24:
        return []
    found: list[StreamPackedConfig] = []
    if rows <= 32 and not is_wide:
        found = [replace(taken, slabs=s, num_stages=t, in_turns=True) for s, t in _NARROW_TURNS]
        found.append(replace(taken, num_ahead=2))
    portions = _MANY if rows > 32 else _WIDE if is_wide else _NARROW
    for own, slabs, stages in portions:
        tile = 32 if own <= 32 else 64 if own <= 64 else 128
        found.append(StreamPackedConfig(own, tile, taken.block_m, slabs, stages, 1))
    if rows > 64:
        found += [replace(config, block_m=64) for config in found]
    return [config for config in found if _fits(config, n, k)]


def _fits(config: StreamPackedConfig, n: int, k: int) -> bool:
    of_stage = 128 * config.slabs
    is_whole = n % config.rows == 0 and k % of_stage == 0
    return is_whole and config.num_stages <= k // of_stage and sparse_bytes(config) <= 222 << 10


def rehearse(lines: list[Line], dense: bool) -> None:
    """Compile all kernels side by side."""
    with rehearsal():
        for line in lines:
            line.product.run(line.rows, line.config)
            line.product.wanted(line.rows)
            if dense and line.role == "taken":
                line.product.dense_product(line.product.dense)(line.product.x[: line.rows])


@dataclass(frozen=True, slots=True)
class Timed:
    line: Line
    micros: float
    differ: int  # values that are not the dense kernel's

    def __str__(self) -> str:
        line, config = self.line, self.line.config
        kernel = "turns" if config.in_turns else "together"
        text = f"{line.product.name:>16}{line.rows:>5}{kernel:>10}{line.role:>7}"
        return text + f"{self.micros:>8.2f}{self.differ:>7}  {astuple(config)[:6]}"


def measure(line: Line) -> Timed:
    product, rows, config = line.product, line.rows, line.config
    differ = int((product.run(rows, config) != product.wanted(rows)).sum())
    return Timed(line, product.micros(rows, config), differ)


def sums(timed: list[Timed], dense: dict[str, float]) -> str:
    """Of the products of a layer, for one number of rows: lines with the fastest sizes of each."""
    lines: list[str] = []
    totals = [0.0, 0.0, 0.0]  # taken, fastest, bf16
    for n, k, gated in SHAPES[:4]:
        of = [
            t for t in timed if (t.line.product.shape, bool(t.line.product.gate)) == ((n, k), gated)
        ]
        taken = next(t for t in of if t.line.role == "taken")
        best = min(of, key=lambda t: t.micros)
        name = best.line.product.name
        for i, micros in enumerate((taken.micros, best.micros, dense.get(name, 0.0))):
            totals[i] += micros
        lines.append(f"{best}  fastest")
    said = ", ".join(
        f"{n} {t:.1f}" for n, t in zip(("taken", "fastest", "bf16"), totals, strict=True)
    )
    return "\n".join([*lines, f"layer, {timed[0].line.rows} rows, us: {said}"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--form", default="int4-g128")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--max-seconds", type=float, default=60.0)
    args = parser.parse_args()
    deadline = time.monotonic() + args.max_seconds
    torch.manual_seed(7)
    products = [Product(args.form, *shape) for shape in SHAPES]
    print(f"{'weight':>16}{'rows':>5}{'kernel':>10}{'role':>7}{'us':>8}{'wrong':>7}  sizes")
    wrong, totals = 0, []
    for rows in map(int, args.rows.split(",")):
        lines = lines_of(products, rows, args.sweep)
        rehearse(lines, args.dense)
        dense = {p.name: p.dense_micros(rows) for p in products} if args.dense else {}
        for name, micros in dense.items():
            print(f"{name:>16}{rows:>5}{'bf16':>10}{'dense':>7}{micros:>8.2f}", flush=True)
        timed: list[Timed] = []
        for line in lines:
            if time.monotonic() > deadline:
                print("out of time: the table is partial", *totals, sep="\n")
                return 1
            timed.append(measure(line))
            wrong += timed[-1].differ
            print(timed[-1], flush=True)
        if all(t.differ == 0 for t in timed):
            totals.append(sums(timed, dense))
    print(*totals, f"{wrong} values differ", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
