"""Rounding in the kernels that make the inputs of W8A8 products: equal bits, and how much faster?

One JSON line for each measurement, microseconds, on the shapes of the 8B model; bits are compared
first. `norm`: a norm and the rounding of what it makes, apart and joined. `block`: norm, gate | up
and down one after the other, as the engine makes them, apart and joined. `gate`: gate | up and the
rounding before `down`: the product with the gate, or a product without it (the library's, or ours)
and a gate that rounds; `gate alone` is that last launch. `many`: kernels for 129-256 rows; `sums`
are the library's of int8, without scales, which the engine does not take. `parts`: rounding alone,
by how many programs share a row. Called by `python -m benchmarks.gpu_w8a8 --joints`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
from quire.kernels.chip import H200
from quire.kernels.eight_bit_configs import NARROW_TILE, WIDE_TILE, pick_eight_bit_stream
from quire.kernels.eight_bit_matmul import eight_bit_matmul, pick_eight_bit
from quire.kernels.eight_bit_weight import EightBitWeight
from quire.kernels.rehearsal import rehearsal
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rms_norm_round import rms_norm_round
from quire.kernels.round_inputs import RoundedRows, Rounding, round_inputs
from quire.kernels.silu_mul import silu_mul
from quire.kernels.silu_mul_round import silu_mul_round
from quire.kernels.stream_eight_bit import StreamEightBit
from quire.kernels.vendor_eight_bit import VendorEightBit
from quire.ops.eight_bit_joints import EightBitPair, NormedProduct
from quire.ops.eight_bit_linear import EightBitLinear

HIDDEN, FFN = 4096, 14336
E4M3 = torch.float8_e4m3fn
ROUNDINGS = {"fp8": Rounding(E4M3), "int8": Rounding(torch.int8)}
NARROW = ((6144, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, FFN))


Call = Callable[[], object]
Product = Callable[[], Tensor]
PickWeights = Callable[[str, int, int], list[EightBitWeight]]


@dataclass(frozen=True, slots=True)
class Case:
    """Ways of making the same bits, each over weights of its own."""

    what: str
    of: Mapping[str, object]
    ways: dict[str, list[Call]]


def run_joints(names: list[str], pick: PickWeights, max_seconds: float) -> int:
    """Returns how many had other bits. The most telling come first: time may run out."""
    started, wrong = time.monotonic(), 0
    found: list[Callable[[], Iterator[Case]]] = [norm_cases]
    for name in names:
        found += [partial(block_cases, name, pick), partial(gate_cases, name, pick)]
    found += [part_cases, *(partial(many_cases, name, pick) for name in reversed(names))]
    complete = True
    for stage in found:
        cases = list(stage())
        with rehearsal():  # all kernels of a stage are compiled side by side
            for case in cases:
                for calls in case.ways.values():
                    calls[0]()
        for case in cases:
            complete = time.monotonic() - started < max_seconds
            if not complete:
                break
            wrong += not measure(case)
        if not complete:
            break
    say("seconds", total=time.monotonic() - started, complete=complete, wrong=wrong)
    return wrong


def measure(case: Case) -> bool:
    want, *others = [bits(calls[0]()) for calls in case.ways.values()]
    equal = all(torch.equal(a, b) for made in others for a, b in zip(made, want, strict=True))
    micros = {name: graph_micros(calls) for name, calls in case.ways.items()}
    say(case.what, **case.of, equal=equal, **micros)
    return equal


def bits(made: object) -> list[Tensor]:
    """Copies of every tensor in a result, as comparable numbers: some ways share their memory."""
    if isinstance(made, Tensor):
        return [(made.view(torch.uint8) if made.itemsize == 1 else made).clone()]
    assert isinstance(made, tuple)
    return [each for part in made for each in bits(part)]


def say(what: str, **found: object) -> None:
    micros = {k: round(v, 2) if isinstance(v, float) else v for k, v in found.items()}
    print(json.dumps({"what": what, **micros}), flush=True)


def rows_of(m: int, k: int) -> Tensor:
    x = torch.randn(m, k, device="cuda") * torch.randn(m, k, device="cuda").exp()
    return x.bfloat16()


def few(calls: list[Call], m: int) -> list[Call]:
    """As many as take a millisecond or two."""
    return calls[: max(1, 4096 // m)]


# ------------------------------------------------------------ what is timed


def norm_cases() -> Iterator[Case]:
    weight = torch.randn(HIDDEN, device="cuda").bfloat16()

    def apart(x: Tensor, residual: Tensor, rounding: Rounding) -> object:
        normed, stream = rms_norm(x, weight, 1e-5, residual)
        return round_inputs(normed, rounding), stream

    for m in (1, 32, 256, 2048, 8192):
        x, residual = rows_of(m, HIDDEN), rows_of(m, HIDDEN)
        for name, rounding in ROUNDINGS.items():
            joined = partial(rms_norm_round, x, weight, 1e-5, rounding, residual)
            ways: dict[str, list[Call]] = {"apart": [partial(apart, x, residual, rounding)] * 32}
            yield Case("norm", {"form": name, "rows": m}, {**ways, "joined": [joined] * 32})


def block_cases(name: str, pick: PickWeights) -> Iterator[Case]:
    """The chain from one norm to the next, of several layers one after the other."""
    rounding, library = ROUNDINGS[name], VendorEightBit()
    norm = torch.randn(HIDDEN, device="cuda").bfloat16()
    # Pieces of one memory: a layer's two should not be the same bytes.
    weights = zip(pick(name, 2 * FFN, HIDDEN), reversed(pick(name, HIDDEN, FFN)), strict=False)
    layers = [
        EightBitPair(
            EightBitLinear(up, rounding, None, "silu", library),
            EightBitLinear(down, rounding, None, None, library),
        )
        for up, down in weights
    ]

    def apart(layer: EightBitPair, x: Tensor, residual: Tensor) -> object:
        normed, stream = rms_norm(x, norm, 1e-5, residual)
        return layer.down(layer.up(normed)), stream

    for m in (1, 32, 128, 256, 2048, 8192):
        x, residual = rows_of(m, HIDDEN), rows_of(m, HIDDEN)
        one: list[Call] = [partial(apart, layer, x, residual) for layer in layers]
        joints = [NormedProduct(layer, norm, 1e-5) for layer in layers]
        two: list[Call] = [partial(joint, x, residual) for joint in joints]
        yield Case(
            "block", {"form": name, "rows": m}, {"apart": few(one, m), "joined": few(two, m)}
        )


def gate_cases(name: str, pick: PickWeights) -> Iterator[Case]:
    rounding, library = ROUNDINGS[name], VendorEightBit()
    weights = pick(name, 2 * FFN, HIDDEN)
    kernels = [EightBitLinear(w, rounding, None, "silu") for w in weights]

    def gated(kernel: EightBitLinear, x: RoundedRows) -> object:
        return round_inputs(kernel.multiply(x, torch.bfloat16), rounding)

    def after(product: Product) -> object:
        return silu_mul_round(product(), rounding)

    for m in (129, 192, 256, 512, 2048, 8192):
        x, of = round_inputs(rows_of(m, HIDDEN), rounding), {"form": name, "rows": m}
        ways: dict[str, list[Call]] = {"gated": [partial(gated, k, x) for k in kernels]}
        for tile_n in (NARROW_TILE, WIDE_TILE):
            ways[f"ours{tile_n}"] = [partial(after, many(x, w, tile_n)) for w in weights]
        if name == "fp8":
            ways["library"] = [partial(after, partial(library, x, w, None)) for w in weights]
        else:
            yield sums_case(x, weights, of)
        yield Case("gate", dict(of), {way: few(calls, m) for way, calls in ways.items()})
        pairs = tiled(x, weights[0])
        inner = silu_mul(pairs, interleaved=True)
        alone: list[Call] = [partial(silu_mul_round, pairs, rounding)] * 32
        rounded: list[Call] = [partial(round_inputs, inner, rounding)] * 32
        yield Case("gate alone", dict(of), {"gate": alone, "rounding": rounded})


def tiled(x: RoundedRows, w: EightBitWeight) -> Tensor:
    tile = pick_eight_bit(len(x.codes), w.shape[0], 132)
    return eight_bit_matmul(x, w, None, torch.bfloat16, tile)


def many(x: RoundedRows, w: EightBitWeight, tile_n: int) -> Product:
    from quire.kernels.many_eight_bit import ManyEightBit

    kernel = ManyEightBit(w, None, None)

    def call() -> Tensor:
        out = torch.empty(len(x.codes), w.shape[0], dtype=torch.bfloat16, device="cuda")
        kernel(x, out, tile_n)
        return out

    return call


def sums_case(x: RoundedRows, weights: list[EightBitWeight], of: Mapping[str, object]) -> Case:
    calls: list[Call] = [partial(torch._int_mm, x.codes, w.codes.t()) for w in weights]
    n, k = weights[0].shape
    return Case("sums", {**of, "weight": f"{n}x{k}"}, {"library": few(calls, len(x.codes))})


def streamed(kernel: StreamEightBit, x: RoundedRows, gate: str | None, size: int) -> Tensor:
    """As `size` rows are."""
    n, k = kernel.weight.shape
    out = torch.empty(len(x.codes), n // (2 if gate else 1), dtype=torch.bfloat16, device="cuda")
    config = pick_eight_bit_stream(size, n, k, H200)
    assert config is not None
    kernel(x, out, config)
    return out


def many_cases(name: str, pick: PickWeights) -> Iterator[Case]:
    library = VendorEightBit()
    for n, k in NARROW:
        weights = pick(name, n, k)
        for m in (192, 256):
            x, of = round_inputs(rows_of(m, k), ROUNDINGS[name]), {"form": name, "rows": m}
            ways: dict[str, list[Call]] = {"tiled": [partial(tiled, x, w) for w in weights]}
            for tile_n in (NARROW_TILE, WIDE_TILE):
                ways[f"tiles{tile_n}"] = [many(x, w, tile_n) for w in weights]
            for size in (64, 128):
                kernels = [StreamEightBit(w, None, None) for w in weights]
                ways[f"stream{size}"] = [partial(streamed, w, x, None, size) for w in kernels]
            if name == "fp8":
                ways["library"] = [partial(library, x, w, None) for w in weights]
            else:
                yield sums_case(x, weights, of)
            yield Case("many", {**of, "weight": f"{n}x{k}"}, ways)


def part_cases() -> Iterator[Case]:
    for k in (HIDDEN, FFN):
        for m in (1, 8, 32, 128):
            x = rows_of(m, k)
            ways: dict[str, list[Call]] = {
                str(n): [partial(round_inputs, x, ROUNDINGS["fp8"], n)] * 32 for n in (1, 2, 4, 8)
            }
            of = {"rows": m, "inputs": k, "picked": roundings.parts_of(m, k)}
            yield Case("parts", of, ways)


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
