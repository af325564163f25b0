"""Streamed products of int4 weights on Hopper: bits, and microseconds by each kernel that can.

A line is a weight, a number of rows and the sizes that `stream_packed_ways` picks for a kernel:
`turns`, where two groups take turns at a sum, or `together`. The one that products take comes first
and is marked. Times are of graph replays over copies that the L2 does not hold. Bits are compared
with the dense kernel's. `--sweep` times other sizes too. Exits with 1 where a bit differs.

    python -m benchmarks.gpu_stream_packed --max-seconds 40
    python -m benchmarks.gpu_stream_packed --rows 64,128 --sweep
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
from quire.kernels.matmul import interleave, matmul
from quire.kernels.rehearsal import rehearsal
from quire.kernels.slabs import Slabs
from quire.kernels.stream_packed import StreamPacked
from quire.kernels.stream_packed_configs import StreamPackedConfig
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
        self.copies = [StreamPacked(each, None, self.gate) for each in _copies(slabs)]
        self.x = spread((max(ROWS), k)) * k**-0.5

    @property
    def first(self) -> StreamPacked:
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


@dataclass(frozen=True, slots=True)
class Line:
    product: Product
    rows: int
    config: StreamPackedConfig
    role: str  # "taken", "can" or "sweep"


def _copies(slabs: Slabs) -> list[Slabs]:
    count = max(1, -(-ROTATE_BYTES // slabs.num_bytes))
    return [slabs] + [replace(slabs, codes=slabs.codes.clone()) for _ in range(count - 1)]


def lines_of(products: list[Product], rows: int, sweep: bool) -> list[Line]:
    lines: list[Line] = []
    for product in products:
        ways = product.first.ways(rows)
        lines += [Line(product, rows, way, "can" if i else "taken") for i, way in enumerate(ways)]
        others = dict.fromkeys(other_sizes(rows, ways[0]) if sweep else ())
        lines += [Line(product, rows, config, "sweep") for config in others]
    return lines


def other_sizes(rows: int, taken: StreamPackedConfig) -> list[StreamPackedConfig]:
    """Sizes that nobody timed yet."""
    if 64 < rows <= 128:
        slabs = 1 if taken.rows > 64 else 2
        return [replace(taken, block_m=128, slabs=slabs), replace(taken, block_m=128, slabs=1)]
    if 32 < rows <= 64 and taken.tile <= 64:
        return [replace(taken, slabs=2, num_stages=4, in_turns=True)]
    return []


def rehearse(lines: list[Line]) -> None:
    """Compile all kernels side by side."""
    with rehearsal():
        for line in lines:
            line.product.run(line.rows, line.config)
            line.product.wanted(line.rows)


def measure(line: Line) -> tuple[str, int]:
    """A line of the table, and how many values are not the dense kernel's."""
    product, rows, config = line.product, line.rows, line.config
    differ = int((product.run(rows, config) != product.wanted(rows)).sum())
    kernel = "turns" if config.in_turns else "together"
    text = f"{product.name:>16}{rows:>5}{kernel:>10}{line.role:>7}"
    text += f"{product.micros(rows, config):>8.2f}{differ:>7}  {astuple(config)[:6]}"
    return text, differ


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--form", default="int4-g128")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--max-seconds", type=float, default=60.0)
    args = parser.parse_args()
    deadline = time.monotonic() + args.max_seconds
    torch.manual_seed(7)
    products = [Product(args.form, *shape) for shape in SHAPES]
    print(f"{'weight':>16}{'rows':>5}{'kernel':>10}{'role':>7}{'us':>8}{'wrong':>7}  sizes")
    wrong = 0
    for rows in map(int, args.rows.split(",")):
        lines = lines_of(products, rows, args.sweep)
        rehearse(lines)
        for line in lines:
            if time.monotonic() > deadline:
                print("out of time: the table is partial")
                return 1
            text, differ = measure(line)
            wrong += differ
            print(text, flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
