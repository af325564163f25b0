"""Rounding in the kernel that makes the inputs of W8A8 products: equal bits, and how much faster?

One JSON line for each measurement, microseconds, on the shapes of the 8B model; bits are compared
first. `norm`: a norm and the rounding of what it makes, apart and joined. `parts`: rounding alone,
by how many programs share a row. `gate`: gate | up and the rounding before `down`: the product with
the gate, or a product without it (the library's, or ours) and a gate that rounds. `block`: norm,
gate | up and down one after the other, as the engine makes them, apart and joined. `many`: kernels
for 129-256 rows. Called by `python -m benchmarks.gpu_w8a8 --joints`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_matmul import become_compiler, graph_micros
from benchmarks.gpu_packed import Compiling, inspect
from quire.kernels import rms_norm as norms
from quire.kernels import rms_norm_round as rounded_norms
from quire.kernels import round_inputs as roundings
from quire.kernels import silu_mul_round as gates
from quire.kernels.eight_bit_configs import NARROW_TILE, WIDE_TILE, pick_eight_bit_stream
from quire.kernels.eight_bit_matmul import eight_bit_matmul, pick_eight_bit
from quire.kernels.eight_bit_weight import EightBitWeight
from quire.kernels.rehearsal import rehearsal
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rms_norm_round import rms_norm_round
from quire.kernels.round_inputs import RoundedRows, Rounding, round_inputs
from quire.kernels.silu_mul import silu_mul
from quire.kernels.silu_mul_round import silu_mul_round
from quire.kernels.vendor_eight_bit import VendorEightBit
from quire.ops.eight_bit_joints import EightBitPair, NormedProduct
from quire.ops.eight_bit_linear import EightBitLinear

HIDDEN, FFN = 4096, 14336
E4M3 = torch.float8_e4m3fn
ROUNDINGS = {"fp8": Rounding(E4M3), "int8": Rounding(torch.int8)}
NARROW = ((6144, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, FFN))


class Clock:
    """Rows to be timed, while there is time."""

    def __init__(self, seconds: float) -> None:
        self.started, self.seconds = time.monotonic(), seconds

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def rows(self, *rows: int) -> Iterator[int]:
        return (m for m in rows if self.elapsed < self.seconds)


Call = Callable[[], object]
Product = Callable[[], Tensor]
PickWeights = Callable[[str, int, int], list[EightBitWeight]]


def say(what: str, **found: object) -> None:
    micros = {k: round(v, 2) if isinstance(v, float) else v for k, v in found.items()}
    print(json.dumps({"what": what, **micros}), flush=True)


def bits(made: object) -> list[Tensor]:
    """Every tensor in a result, as comparable numbers."""
    if isinstance(made, Tensor):
        return [made.view(torch.uint8) if made.itemsize == 1 else made]
    assert isinstance(made, tuple)
    return [each for part in made for each in bits(part)]


def same(ways: dict[str, Call]) -> bool:
    """Whether all give the bits of the first. All are compiled before."""
    with rehearsal():
        for call in ways.values():
            call()
    want, *others = [bits(call()) for call in ways.values()]
    return all(torch.equal(a, b) for made in others for a, b in zip(made, want, strict=True))


def rows_of(m: int, k: int) -> Tensor:
    x = torch.randn(m, k, device="cuda") * torch.randn(m, k, device="cuda").exp()
    return x.bfloat16()


def compare(what: str, ways: dict[str, list[Call]], **of: object) -> bool:
    """Time ways of the same thing, each over its own weights."""
    equal = same({name: calls[0] for name, calls in ways.items()})
    say(what, **of, equal=equal, **{name: graph_micros(calls) for name, calls in ways.items()})
    return equal


# ------------------------------------------------------------ what is timed


def time_norms(clock: Clock) -> int:
    weight, wrong = torch.randn(HIDDEN, device="cuda").bfloat16(), 0
    for m in clock.rows(1, 32, 256, 2048, 8192):
        x, residual = rows_of(m, HIDDEN), rows_of(m, HIDDEN)
        for name, rounding in ROUNDINGS.items():

            def apart(x: Tensor, residual: Tensor, rounding: Rounding) -> object:
                normed, stream = rms_norm(x, weight, 1e-5, residual)
                return round_inputs(normed, rounding), stream

            joint = partial(rms_norm_round, x, weight, 1e-5, rounding, residual)
            ways: dict[str, Call] = {"apart": partial(apart, x, residual, rounding)}
            ways["joined"] = joint
            made: dict[str, list[Call]] = {way: [call] * 32 for way, call in ways.items()}
            wrong += not compare("norm", made, form=name, rows=m)
    return wrong


def time_parts(clock: Clock) -> int:
    wrong = 0
    for k in (HIDDEN, FFN):
        for m in clock.rows(1, 8, 32, 128):
            x = rows_of(m, k)
            made: dict[str, list[Call]] = {
                str(n): [partial(round_inputs, x, ROUNDINGS["fp8"], n)] * 32 for n in (1, 2, 4, 8)
            }
            wrong += not compare("parts", made, rows=m, inputs=k, picked=roundings.parts_of(m, k))
    return wrong


def tiled(x: RoundedRows, w: EightBitWeight, gate: str | None = None) -> Tensor:
    tile = pick_eight_bit(len(x.codes), w.shape[0], 132)
    return eight_bit_matmul(x, w, None, torch.bfloat16, tile, gate)


def many(x: RoundedRows, w: EightBitWeight, tile_n: int, gate: str | None = None) -> Product:
    from quire.kernels.many_eight_bit import ManyEightBit

    kernel = ManyEightBit(w, None, gate)
    width = w.shape[0] // (2 if gate else 1)
    out = torch.empty(len(x.codes), width, dtype=torch.bfloat16, device="cuda")

    def call() -> Tensor:
        kernel(x, out, tile_n)
        return out

    return call


def time_gates(name: str, weights: list[EightBitWeight], clock: Clock) -> int:
    """As many weights as make a millisecond or two."""
    rounding, library, wrong = ROUNDINGS[name], VendorEightBit(), 0
    for m in clock.rows(129, 192, 256, 512, 2048, 8192):
        x = round_inputs(rows_of(m, HIDDEN), rounding)
        some = weights[: max(1, min(len(weights), 4096 // m))]
        gated = [EightBitLinear(w, rounding, None, "silu") for w in some]

        def with_gate(kernel: EightBitLinear, x: RoundedRows) -> object:
            return round_inputs(kernel.multiply(x, torch.bfloat16), rounding)

        def after(product: Product) -> object:
            return silu_mul_round(product(), rounding)

        ways: dict[str, list[Call]] = {"gated": [partial(with_gate, k, x) for k in gated]}
        for tile_n in (NARROW_TILE, WIDE_TILE):
            ways[f"ours{tile_n}"] = [partial(after, many(x, w, tile_n)) for w in some]
        if name == "fp8":
            ways["library"] = [partial(after, partial(library, x, w, None)) for w in some]
        pairs = tiled(x, some[0])
        alone = graph_micros([partial(silu_mul_round, pairs, rounding)] * 32)
        inner = silu_mul(pairs, interleaved=True)
        separate = graph_micros([partial(round_inputs, inner, rounding)] * 32)
        of = {"form": name, "rows": m, "gate_alone": alone, "round_alone": separate}
        wrong += not compare("gate", ways, **of)
    return wrong


def time_blocks(
    name: str, ups: list[EightBitWeight], downs: list[EightBitWeight], clock: Clock
) -> int:
    """The chain from one norm to the next, of several layers one after the other."""
    rounding, library, wrong = ROUNDINGS[name], VendorEightBit(), 0
    norm = torch.randn(HIDDEN, device="cuda").bfloat16()
    layers = [
        EightBitPair(
            EightBitLinear(up, rounding, None, "silu", library),
            EightBitLinear(down, rounding, None, None, library),
        )
        for up, down in zip(ups, reversed(downs), strict=False)  # pieces of one memory
    ]
    for m in clock.rows(1, 32, 128, 256, 2048, 8192):
        x, residual = rows_of(m, HIDDEN), rows_of(m, HIDDEN)

        def apart(layer: EightBitPair, x: Tensor, residual: Tensor) -> object:
            normed, stream = rms_norm(x, norm, 1e-5, residual)
            return layer.down(layer.up(normed)), stream

        some = layers[: max(1, min(len(layers), 4096 // m))]
        ways: dict[str, list[Call]] = {
            "apart": [partial(apart, layer, x, residual) for layer in some],
            "joined": [partial(NormedProduct(layer, norm, 1e-5), x, residual) for layer in some],
        }
        wrong += not compare("block", ways, form=name, rows=m)
    return wrong


def time_many(name: str, pick: PickWeights, clock: Clock) -> int:
    from quire.kernels.stream_eight_bit import StreamEightBit

    library, wrong = VendorEightBit(), 0
    for n, k in NARROW:
        weights = pick(name, n, k)
        streams = [StreamEightBit(w, None, None) for w in weights]
        for m in clock.rows(192, 256):
            x = round_inputs(rows_of(m, k), ROUNDINGS[name])
            out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")

            def streamed(stream: StreamEightBit, x: RoundedRows, out: Tensor, size: int) -> Tensor:
                config = pick_eight_bit_stream(size, *stream.weight.shape)
                assert config is not None
                stream(x, out, config)
                return out

            ways: dict[str, list[Call]] = {"tiled": [partial(tiled, x, w) for w in weights]}
            for tile_n in (NARROW_TILE, WIDE_TILE):
                ways[f"tiles{tile_n}"] = [many(x, w, tile_n) for w in weights]
            for size in (64, 128):
                calls: list[Call] = [partial(streamed, each, x, out, size) for each in streams]
                ways[f"stream{size}"] = calls
            if name == "fp8":
                ways["library"] = [partial(library, x, w, None) for w in weights]
            wrong += not compare("many", ways, form=name, rows=m, weight=f"{n}x{k}")
    return wrong


def run_joints(names: list[str], pick: PickWeights, max_seconds: float) -> int:
    """Returns how many had other bits. The most telling come first: time may run out."""
    clock, wrong = Clock(max_seconds), 0
    wrong += time_norms(clock)
    for name in names:
        ups, downs = pick(name, 2 * FFN, HIDDEN), pick(name, HIDDEN, FFN)
        wrong += time_blocks(name, ups, downs, clock)
        wrong += time_gates(name, ups, clock)
        wrong += time_many(name, pick, clock)
    wrong += time_parts(clock)
    say("seconds", total=clock.elapsed, complete=clock.elapsed < max_seconds, wrong=wrong)
    return wrong


# ------------------------------------------------------------ compiling


def compile_joints() -> int:
    """A line for each kernel; returns how many spill, or sum a row in another order than the norm
    whose bits they must have."""
    become_compiler()
    bad = 0
    for width, x_dtype, weight_dtype, adds in NORMS:
        x, weight = torch.empty(3, width, dtype=x_dtype), torch.empty(width, dtype=weight_dtype)
        residual = x if adds else None
        plain = Compiling(norms, norms._rms_norm_kernel)
        rms_norm(x, weight, 1e-5, residual)
        for name, rounding in ROUNDINGS.items():
            joined = Compiling(rounded_norms, rounded_norms._rms_norm_round_kernel)
            rms_norm_round(x, weight, 1e-5, rounding, residual)
            is_same = order_of(joined.made) == order_of(plain.made)
            bad += report(f"norm {width} {x_dtype} {name}", joined.made, is_same)
    for name, rounding in ROUNDINGS.items():
        for width in (3072, FFN, 17408):
            gate = Compiling(gates, gates._silu_mul_round_kernel)
            silu_mul_round(torch.empty(3, 2 * width, dtype=torch.bfloat16), rounding)
            bad += report(f"gate {width} {name}", gate.made)
        for width, parts in ((HIDDEN, 1), (HIDDEN, 4), (FFN, 1), (FFN, 8)):
            alone = Compiling(roundings, roundings._round_kernel)
            round_inputs(torch.empty(1, width, dtype=torch.bfloat16), rounding, parts)
            bad += report(f"round {width} in {parts} {name}", alone.made)
    return bad


NORMS = [
    (width, x_dtype, weight_dtype, adds)
    for width in (HIDDEN, 2882)
    for x_dtype, weight_dtype in (
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
    )
    for adds in (False, True)
]


def report(what: str, kernel: Any, has_order: bool = True) -> bool:
    made = inspect(kernel)
    said = "" if has_order else ", SUMS IN ANOTHER ORDER"
    print(f"{what}: {made.registers} registers, {made.spilled} bytes spilled{said}", flush=True)
    return made.spilled > 0 or not has_order


def order_of(kernel: Any) -> tuple[str, int]:
    """How the first sum of a row is spread over threads, and how many products are summed without
    a rounding between: what its bits depend on."""
    text = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked.*)$", text, re.MULTILINE))
    found = re.search(r'"tt\.reduce"\([^)]*\)[\s\S]*?: \(tensor<\d+xf32, (#\w+)>', text)
    assert found is not None, "no sum of a row"
    return layouts[found[1]], len(re.findall(r"\bfma\.rn", kernel.asm["ptx"]))
