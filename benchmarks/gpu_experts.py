"""A layer's experts in eight bits by eight (W8A8), packed, and in bf16: which is how fast?

Whole layers of random experts, from sorted pairs to the sum, timed by graph replay over routings
that rotate: experts of a few tokens are read from memory each time. `W8A8` has both products and
both roundings, `packed` the same weights with inputs in bf16, `dense` bf16 weights. "up" and "down"
are the grouped W8A8 products alone. Prints a JSON line a row; fails where a token's bits are not
those of its experts' dense products. `--tiles` times the grouped products by each tile.

    python -m benchmarks.gpu_experts --max-seconds 80
    python -m benchmarks.gpu_experts --forms fp8 --tokens 32,2048 --tiles
    python -m benchmarks.gpu_experts --compile-only          # no GPU needed
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_matmul import SHARED_BYTES, become_compiler, graph_micros
from benchmarks.gpu_packed import Compiling, inspect
from quire.kernels import grouped_eight_bit, spread_scales
from quire.kernels.eight_bit_matmul import EightBitTile, eight_bit_matmul
from quire.kernels.grouped_eight_bit import TILES, multiply_eight_bit, pick_grouped_eight_bit
from quire.kernels.grouped_matmul import GroupTile
from quire.kernels.rehearsal import rehearsal
from quire.kernels.round_inputs import RoundedRows, round_inputs
from quire.kernels.route import SortedPairs, sort_pairs
from quire.nn.ops import GateForm, Visits
from quire.ops.cuda_ops import GroupedExperts, gate
from quire.ops.eight_bit_experts import EightBitExperts, ExpertBytes, expert_bytes
from quire.ops.eight_bit_of import eight_bit_form
from quire.ops.packed_experts import ExpertSlabs, PackedExperts
from quire.ops.slabs_of import slabs_of
from quire.quant.coded import Coded
from quire.quant.scaled import Scaled
from quire.quant.weight import Inputs, Weight

E4M3 = torch.float8_e4m3fn
TOKENS = (1, 32, 128, 2048)

ROUTINGS = 8  # that rotate: more than the L2 holds, with one token too
ONE_TILE = EightBitTile(16, 64, 3, 4, 64)
MORE_TILES = (
    *(GroupTile(16, 64, 128, 3, 4), GroupTile(16, 64, 128, 8, 4), GroupTile(16, 128, 128, 4, 4)),
    *(GroupTile(32, 128, 128, 4, 8), GroupTile(64, 128, 128, 3, 4), GroupTile(64, 128, 128, 3, 8)),
    *(GroupTile(128, 64, 128, 4, 4), GroupTile(128, 128, 128, 3, 8)),
)


@dataclass(frozen=True, slots=True)
class Layer:
    num: int
    top_k: int
    hidden: int
    ffn: int


LAYERS = {
    "qwen3-30b-a3b": Layer(128, 8, 2048, 768),
    "mixtral-8x7b": Layer(8, 2, 4096, 14336),
    "deepseek-v2-lite": Layer(64, 6, 2048, 1408),
}


def _floats(n: int, k: int, device: str) -> Tensor:
    if device == "cpu":
        return torch.empty(n, k, dtype=E4M3)
    return (torch.randn(n, k, device=device, dtype=torch.bfloat16) * 60).clamp(-448, 448).to(E4M3)


def _scaled(block: tuple[int, int], inputs: Inputs, n: int, k: int, device: str) -> Weight:
    height, width = block[0], block[1] or k
    scales = torch.rand(-(-n // height), -(-k // width), device=device) * 0.001
    return Scaled(_floats(n, k, device), scales, (height, width), inputs)


def _int8(n: int, k: int, device: str) -> Weight:
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, device=device)
    scales = torch.rand(n, 1, device=device) * 0.001
    return Coded(codes, 8, 32, scales, inputs="int8-row", share=k // 32)


FORMS: dict[str, Callable[[int, int, str], Weight]] = {
    "fp8": partial(_scaled, (1, 0), "fp8-row"),
    "fp8-blocks": partial(_scaled, (128, 128), "fp8-128"),
    "int8": _int8,
}


def bytes_of(weight: Weight, num: int, paired: bool) -> ExpertBytes:
    form = eight_bit_form(weight)
    assert form is not None
    return expert_bytes(weight, form, None, num, paired)


class Weights:
    """A layer's experts in three forms; the floats are those of the weights, so far as bf16 can."""

    def __init__(self, layer: Layer, form: str, dense: bool) -> None:
        self.layer = layer
        self.up = FORMS[form](layer.num * 2 * layer.ffn, layer.hidden, "cuda")
        self.down = FORMS[form](layer.num * layer.hidden, layer.ffn, "cuda")
        slabs = slabs_of(self.up), slabs_of(self.down)
        assert slabs[0] is not None and slabs[1] is not None
        act = partial(gate, form=GateForm())
        self.bytes = bytes_of(self.up, layer.num, True), bytes_of(self.down, layer.num, False)
        self.rounded = EightBitExperts(*self.bytes, layer.num, GateForm(), act)
        parts = ExpertSlabs(slabs[0], None), ExpertSlabs(slabs[1], None)
        self.packed = PackedExperts(*parts, layer.num, act)
        self.dense = self._floats() if dense else None

    def _floats(self) -> GroupedExperts:
        num = self.layer.num
        up, down = (w.dequantize().bfloat16() for w in (self.up, self.down))
        return GroupedExperts(
            (up.view(num, -1, up.shape[1]), None), (down.view(num, -1, down.shape[1]), None)
        )


def routings(layer: Layer, tokens: int) -> list[Visits]:
    made = []
    for _ in range(ROUTINGS):
        scores = torch.rand(tokens, layer.num, device="cuda")
        shares = torch.rand(tokens, layer.top_k, device="cuda")
        made.append(Visits(scores.topk(layer.top_k).indices.int(), shares))
    return made


def products(
    weights: Weights, x: Tensor, visits: Visits, tile: GroupTile | None = None
) -> list[Callable[[], Tensor]]:
    """The grouped products alone, by a tile."""
    layer, (up, down) = weights.layer, weights.bytes
    pairs = sort_pairs(visits.experts, layer.num)
    inner = torch.randn(len(x) * layer.top_k, layer.ffn, device="cuda").bfloat16()
    rows = round_inputs(x, up.rounding), round_inputs(inner, down.rounding)
    first = partial(
        multiply_eight_bit, rows[0], up.weight, pairs, None, x.dtype, is_gather=True, gate="silu"
    )
    second = partial(
        multiply_eight_bit, rows[1], down.weight, pairs, None, x.dtype, is_gather=False
    )
    return [partial(first, tile=tile), partial(second, tile=tile)]


def wrong_rows(weights: Weights, x: Tensor, visits: Visits) -> int:
    """Tokens of the first product that have other bits than by their expert's dense one."""
    layer, (up, _) = weights.layer, weights.bytes
    rounded, pairs = round_inputs(x, up.rounding), sort_pairs(visits.experts, layer.num)
    got = multiply_eight_bit(rounded, up.weight, pairs, None, x.dtype, is_gather=True, gate="silu")
    wrong, places = 0, pairs.pairs.long()
    chosen = visits.experts.flatten()[places]
    for expert in chosen.unique().tolist()[:: max(1, layer.num // 16)]:
        own = (chosen == expert).nonzero().squeeze(1)
        rows = slice(expert * 2 * layer.ffn, (expert + 1) * 2 * layer.ffn)
        dense = bytes_of(weights.up.pick(rows), 1, True).weight
        some = places[own] // layer.top_k
        codes = rounded.codes.view(torch.uint8)[some].view(rounded.codes.dtype)
        few = RoundedRows(codes, rounded.scales[some])
        want = eight_bit_matmul(few, dense, None, x.dtype, ONE_TILE, "silu")
        wrong += int((got[own] != want).any(1).sum())
    return wrong


def measure(weights: Weights, tokens: int) -> dict[str, object]:
    x = torch.randn(tokens, weights.layer.hidden, device="cuda").bfloat16()
    visits = routings(weights.layer, tokens)
    ways = {"W8A8": weights.rounded, "packed": weights.packed, "dense": weights.dense}
    with rehearsal():
        for kernel in ways.values():
            if kernel is not None:
                kernel(x, visits[0], None)
        for product in products(weights, x, visits[0]):
            product()
    record: dict[str, object] = {"tokens": tokens}
    for name, kernel in ways.items():
        if kernel is not None:
            calls = [partial(kernel, x, each, None) for each in visits]
            record[f"{name}_us"] = round(graph_micros(calls), 1)
    alone = [products(weights, x, each) for each in visits]
    for at, name in enumerate(("up", "down")):
        record[f"{name}_us"] = round(graph_micros([each[at] for each in alone]), 1)
    reached = len(visits[0].experts.unique())
    own = 3 * weights.layer.hidden * weights.layer.ffn
    record["floor_us"] = round(reached * own / 4.24e6, 1)
    record["wrong_tokens"] = wrong_rows(weights, x, visits[0])
    return record


def by_tiles(weights: Weights, tokens: int) -> dict[str, object]:
    """Microseconds of both products by each tile, the picked one first."""
    x = torch.randn(tokens, weights.layer.hidden, device="cuda").bfloat16()
    visits = routings(weights.layer, tokens)
    picked = pick_grouped_eight_bit(tokens * weights.layer.top_k, weights.layer.num)
    tiles = [picked, *(tile for tile in (*TILES, *MORE_TILES) if tile != picked)]
    with rehearsal():
        for tile in tiles:
            for product in products(weights, x, visits[0], tile):
                product()
    record: dict[str, object] = {"tokens": tokens}
    for tile in tiles:
        alone = [products(weights, x, each, tile) for each in visits]
        times = [graph_micros([each[at] for each in alone]) for at in (0, 1)]
        name = f"{tile.block_m}x{tile.block_n} s{tile.num_stages} w{tile.num_warps}"
        record[name] = [round(micros, 1) for micros in times]
    return record


def run(args: argparse.Namespace) -> int:
    deadline, wrong = time.monotonic() + args.max_seconds, 0
    for shape, form in ((s, f) for s in args.shapes.split(",") for f in args.forms.split(",")):
        weights = Weights(LAYERS[shape], form, not args.tiles)
        for tokens in map(int, args.tokens.split(",")):
            if time.monotonic() > deadline:
                print(json.dumps({"out_of_time": True}))
                return 1
            record = (by_tiles if args.tiles else measure)(weights, tokens)
            wrong += int(str(record.get("wrong_tokens", 0)))
            print(json.dumps({"shape": shape, "form": form, **record}), flush=True)
    return 1 if wrong else 0


def compiled(forms: list[str], tiles: tuple[GroupTile, ...]) -> Iterator[tuple[str, bool]]:
    """A line for each kernel, and whether it is what it should be."""
    become_compiler()
    Compiling(spread_scales, spread_scales._spread_kernel)
    num, n, k = 4, 512, 1024
    for form in forms:
        for tile in tiles:
            for act in (None, "silu"):
                compiling = Compiling(
                    grouped_eight_bit, grouped_eight_bit._grouped_eight_bit_kernel
                )
                part = bytes_of(FORMS[form](num * n, k, "cpu"), num, act is not None)
                scales = torch.empty(8, k // (part.rounding.group or k))
                x = RoundedRows(torch.empty(8, k, dtype=part.weight.codes.dtype), scales)
                pairs = SortedPairs(torch.zeros(8).int(), torch.zeros(num).int(), 1)
                multiply_eight_bit(
                    *(x, part.weight, pairs, None, torch.bfloat16),
                    is_gather=True,
                    gate=act,
                    tile=replace(tile),
                )
                made = inspect(compiling.made)
                is_good = made.spilled == 0 and made.matrix > 0 and made.shared <= SHARED_BYTES
                yield (
                    f"{form:>11}{tile.block_m:>5}x{tile.block_n:<4}{made.registers:>6}"
                    f"{made.spilled:>7}{made.shared:>9,}{made.matrix:>6} {act or ''}"
                    f"{'' if is_good else ' BAD'}",
                    is_good,
                )


def compile_all(forms: list[str], tokens: list[int]) -> int:
    """The tiles that Qwen3's experts take for these tokens."""
    layer = LAYERS["qwen3-30b-a3b"]
    picked = (pick_grouped_eight_bit(count * layer.top_k, layer.num) for count in tokens)
    print(f"{'form':>11}{'tile':>9}{'regs':>6}{'spill':>7}{'shared':>9}{'gmma':>6}")
    bad = 0
    for line, is_good in compiled(forms, tuple(dict.fromkeys(picked))):
        bad += not is_good
        print(line, flush=True)
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="qwen3-30b-a3b", help=f"of {', '.join(LAYERS)}")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--max-seconds", type=float, default=80.0)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    if args.compile_only:
        tokens = [int(count) for count in args.tokens.split(",")]
        return 1 if compile_all(args.forms.split(","), tokens) else 0
    return run(args)


if __name__ == "__main__":
    raise SystemExit(main())
