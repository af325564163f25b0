"""Products with adapters, kernel by kernel: what each launch adds, and in which sizes it is quick.

    python3 -m benchmarks.gpu_lora_kernels --max-seconds 60

First the bits: every row of a crowd alone, in every config, beside fp64. Then microseconds of a
product in a graph over weights that L2 does not hold, by product and rows x adapters: `base`, the
product as it is without adapters; `sums`, its fp32 sums; `shrink`, these and A beside them; `chain`
by config of the last kernel (outputs x ranks at once x warps) and of the one before (`step`: inputs
x warps). Prints a JSON line for each. The last has the best configs
by kernel, over all cases: the sum of their times as parts of the best.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_matmul import graph_micros
from quire.kernels.low_rank_expand import ExpandConfig, low_rank_expand, low_rank_gate
from quire.kernels.low_rank_places import PLACE, Places
from quire.kernels.low_rank_shrink import ShrinkConfig, low_rank_shrink, room_for_ranks
from quire.kernels.rehearsal import rehearsal
from quire.lora.row_tiles import tiles_of
from quire.ops.cuda_ops import CudaOps
from quire.quant.weight import Dense

RANK, ADAPTERS, ROTATE_BYTES = 16, 64, 300 << 20
PRODUCTS: dict[str, tuple[int, tuple[int, ...], str | None]] = {  # of Llama-3.1-8B
    "qkv": (4096, (4096, 1024, 1024), None),
    "out": (4096, (4096,), None),
    "gate_up": (4096, (14336, 14336), "silu"),
    "down": (14336, (4096,), None),
}
CASES = ((1, 1), (32, 1), (32, 32), (64, 64))  # rows, adapters
EXPANDS = {
    "expand": [(64, 32, 4), (32, 64, 4), (32, 32, 4), (64, 64, 8), (64, 16, 4), (128, 32, 4)],
    "gate": [(32, 32, 4), (64, 32, 8), (64, 16, 4), (32, 64, 4), (64, 64, 8), (128, 64, 8)],
}
SHRINKS = [ShrinkConfig(*sizes) for sizes in ((128, 4), (256, 4), (64, 4), (128, 8))]


class Chosen(NamedTuple):
    shrink: ShrinkConfig | None
    expand: ExpandConfig | None


class Product:
    """Some layers of one shape, each with its weight and everybody's A and B."""

    def __init__(self, name: str) -> None:
        self.name, (self.num_in, self.sizes, self.gate) = name, PRODUCTS[name]
        self.kind = "gate" if self.gate else "expand"
        self.num_out = sum(self.sizes)
        self.layers = max(2, ROTATE_BYTES // (2 * self.num_in * self.num_out))
        self.random = torch.Generator("cuda").manual_seed(3)
        ops = CudaOps(torch.device("cuda"), torch.bfloat16)
        weights = [[self.draw(n, self.num_in) / 64 for n in self.sizes] for _ in range(self.layers)]
        self.first = torch.cat(weights[0]).double()
        self.kernels: list[Any] = [
            ops.linear([Dense(part) for part in parts], None, self.gate) for parts in weights
        ]
        of_parts = [RANK * (self.num_in + size) for size in self.sizes]
        self.memory = self.draw(ADAPTERS, self.layers, sum(of_parts)) / 16
        self.origin = torch.zeros(16, dtype=torch.bfloat16, device="cuda")
        self.table = self.filled(of_parts)

    def draw(self, *shape: int) -> Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        return made.normal_(generator=self.random)

    def filled(self, of_parts: list[int]) -> Tensor:
        table = torch.zeros(1 + ADAPTERS, self.layers, 3, PLACE.value, dtype=torch.int64)
        scale = int(np.float32(0.5).view(np.int32))
        origin = (self.memory.data_ptr() - self.origin.data_ptr()) // 2
        for slot in range(ADAPTERS):
            for layer in range(self.layers):
                low = origin + (slot * self.layers + layer) * sum(of_parts)
                for part, numbers in enumerate(of_parts):
                    entry = (low, low + RANK * self.num_in, RANK, scale)
                    table[1 + slot, layer, part] = torch.tensor(entry)
                    low += numbers
        return table.cuda()

    def places(self, layer: int) -> Places:
        return Places(self.origin, self.table, layer, self.sizes, RANK)

    def chain(self, layer: int, x: Tensor, tiles: Tensor, chosen: Chosen) -> Tensor:
        """As `lora/step_on_gpu.py` has it."""
        places, kernel = self.places(layer), self.kernels[layer]
        width = self.sizes[0] if self.gate else self.num_out
        out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
        h = room_for_ranks(x, places)
        sums = kernel.sums(x)
        low_rank_shrink(x, tiles, places, h, chosen.shrink)
        if self.gate is None:
            return low_rank_expand(sums, h, tiles, places, out, chosen.expand)
        form = self.gate, kernel.pairs
        return low_rank_gate(sums, h, tiles, places, out, form, chosen.expand)

    def until_shrink(self, layer: int, x: Tensor, tiles: Tensor) -> Tensor:
        h = room_for_ranks(x, self.places(layer))
        sums: Tensor = self.kernels[layer].sums(x)
        low_rank_shrink(x, tiles, self.places(layer), h)
        return sums

    def wanted(self, x: Tensor, slots: list[int]) -> Tensor:
        """By the first layer in fp64, without rounding in between."""
        made = x.double() @ self.first.T
        begin, of_part = 0, 0
        for size in self.sizes:
            for row, slot in enumerate(slots):
                own = self.memory[slot - 1, 0, of_part:].double() if slot else None
                if own is not None:
                    low = own[: RANK * self.num_in].view(RANK, -1)
                    high = own[RANK * self.num_in : RANK * (self.num_in + size)].view(-1, RANK)
                    made[row, begin : begin + size] += 0.5 * (high @ (low @ x[row].double()))
            begin, of_part = begin + size, of_part + RANK * (self.num_in + size)
        if self.gate is None:
            return made
        gate, up = made.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up


def sent(slots: list[int]) -> Tensor:
    return torch.from_numpy(tiles_of(np.asarray(slots, dtype=np.int64))).cuda()


def choices(kind: str) -> dict[str, Chosen]:
    made = {"usual": Chosen(None, None)}
    for sizes in EXPANDS[kind]:
        made["x".join(map(str, sizes))] = Chosen(None, ExpandConfig(*sizes))
    for config in SHRINKS:
        made[f"step {config.step}x{config.num_warps}"] = Chosen(config, None)
    return made


def check(product: Product) -> dict[str, object]:
    """Rows of 40 adapters, of one, and of none; each alone and in every config."""
    slots = [(7 * row) % 41 for row in range(40)] + [1] * 20 + [0] * 4
    x, tiles = product.draw(len(slots), product.num_in), sent(slots)
    together = product.chain(0, x, tiles, Chosen(None, None))
    wrong = [
        name
        for name, chosen in choices(product.kind).items()
        if not torch.equal(product.chain(0, x, tiles, chosen), together)
    ]
    alone = [
        row
        for row in range(0, len(slots), 3)
        if not torch.equal(
            product.chain(0, x[row : row + 1], sent([slots[row]]), Chosen(None, None))[0],
            together[row],
        )
    ]
    plain = product.kernels[0](x)
    none = [row for row, slot in enumerate(slots) if slot == 0]
    want = product.wanted(x, slots)
    off = ((together.double() - want).abs() / (want.abs() + want.abs().mean())).max().item()
    moved = (together.double() - plain.double()).abs().mean().item()
    return {
        "product": product.name,
        "configs_of_other_bits": wrong,
        "rows_of_other_bits_alone": alone,
        "rows_without_adapter_are_the_products": torch.equal(together[none], plain[none]),
        "largest_difference_from_fp64": round(off, 5),
        "mean_that_adapters_add": round(moved, 4),
    }


def measure(product: Product, rows: int, adapters: int, until: float) -> dict[str, Any]:
    slots = [1 + row % adapters for row in range(rows)]
    x, tiles = product.draw(rows, product.num_in), sent(slots)

    def timed(way: Callable[[int], object]) -> float:
        count = max(product.layers, 12)
        return round(graph_micros([partial(way, i % product.layers) for i in range(count)], 5), 2)

    found: dict[str, Any] = {
        "product": product.name,
        "rows": rows,
        "adapters": adapters,
        "base": timed(lambda layer: product.kernels[layer](x)),
        "sums": timed(lambda layer: product.kernels[layer].sums(x)),
        "shrink": timed(lambda layer: product.until_shrink(layer, x, tiles)),
        "chain": {},
    }
    for name, chosen in choices(product.kind).items():
        if time.monotonic() > until:
            break
        way = partial(product.chain, x=x, tiles=tiles, chosen=chosen)
        found["chain"][name] = timed(way)
    return found


def best(records: list[dict[str, Any]]) -> dict[str, list[tuple[str, float]]]:
    """Configs of each kernel, least lost microseconds first, over all cases that have them all."""
    made: dict[str, list[tuple[str, float]]] = {}
    for kind in EXPANDS:
        own = [r for r in records if (PRODUCTS[r["product"]][2] is not None) == (kind == "gate")]
        own = [r for r in own if len(r["chain"]) == len(choices(kind))]
        lost = {
            name: round(sum(r["chain"][name] - min(r["chain"].values()) for r in own), 2)
            for name in choices(kind)
        }
        made[kind] = sorted(lost.items(), key=lambda pair: pair[1])
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-seconds", type=float, default=60)
    parser.add_argument("--products", default=",".join(PRODUCTS))
    args = parser.parse_args()
    until = time.monotonic() + args.max_seconds
    records, is_wrong = [], False
    with torch.inference_mode():
        for name in args.products.split(","):
            product = Product(name)
            x, tiles = product.draw(32, product.num_in), sent([1] * 32)
            with rehearsal():
                for rows in (1, 32, 64):
                    crowd = product.draw(rows, product.num_in)
                    for chosen in choices(product.kind).values():
                        product.chain(0, crowd, sent([1] * rows), chosen)
                product.kernels[0](x), product.until_shrink(0, x, tiles)
            found = check(product)
            print(json.dumps(found), flush=True)
            is_wrong |= bool(found["configs_of_other_bits"] or found["rows_of_other_bits_alone"])
            is_wrong |= not found["rows_without_adapter_are_the_products"]
            for rows, adapters in CASES:
                records.append(measure(product, rows, adapters, until))
                print(json.dumps(records[-1]), flush=True)
            del product
            torch.cuda.empty_cache()
    print(json.dumps({"lost_microseconds": best(records)}))
    return int(is_wrong)


if __name__ == "__main__":
    raise SystemExit(main())
