"""Products of eight bits by eight: do they build, are all bits the same, how fast are they?

A line has microseconds of the product that the engine takes (`EightBitLinear`, without rounding its
inputs), of the rounding, of the tiled kernel, of that for many rows by tiles of 128 and 256 weight
rows, of the vendor's library and of the dense product in bf16, and the first one's TB/s of weights
and TFLOP/s. "taken" behind it: the library is what the engine takes. 28,672 outputs are gate and
up, with their gate. `--sweep` times other sizes of the streamed kernel. `--compile-only` needs no
GPU. `--joints` has rounding in the kernels that make inputs, and candidates for 129-256 rows
(`gpu_w8a8_joints.py`).

    python -m benchmarks.gpu_w8a8 --max-seconds 60
    python -m benchmarks.gpu_w8a8 --sweep --rows 1,32,64,128
    python -m benchmarks.gpu_w8a8 --joints --max-seconds 50
    python -m benchmarks.gpu_w8a8 --compile-only
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_matmul import ROTATE_BYTES, SHARED_BYTES, become_compiler, graph_micros
from benchmarks.gpu_packed import SHAPES, Compiling, inspect
from benchmarks.gpu_w8a8_joints import compile_joints, run_joints
from quire.kernels import eight_bit_matmul as tiled
from quire.kernels.chip import H200
from quire.kernels.eight_bit_configs import (
    MOST_EIGHT_BIT_ROWS,
    NARROW_TILE,
    WIDE_TILE,
    own_rows,
    pick_eight_bit_stream,
)
from quire.kernels.eight_bit_matmul import eight_bit_matmul, pick_eight_bit
from quire.kernels.eight_bit_weight import CHAIN, EightBitWeight
from quire.kernels.matmul import Layouts, PreparedMatmul
from quire.kernels.packed_matmul import multiprocessors
from quire.kernels.rehearsal import rehearsal
from quire.kernels.round_inputs import RoundedRows, Rounding, round_inputs
from quire.kernels.stream_configs import StreamConfig
from quire.kernels.vendor_eight_bit import VendorEightBit
from quire.ops.eight_bit_linear import EightBitLinear

ROWS = (1, 32, 128, 256, 2048, 8192)
GATED = 28672  # outputs
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Form:
    dtype: torch.dtype
    group: int = 0

    @property
    def rounding(self) -> Rounding:
        return Rounding(self.dtype, self.group or None)

    def weight(self, codes: Tensor, paired: bool) -> EightBitWeight:
        n, k = codes.shape
        rows = self.group or 1  # that share a scale
        shape = (k // self.group if self.group else 1, -(-n // rows))
        scales = torch.rand(shape, device=codes.device) * 0.001
        return EightBitWeight(codes, scales, self.group, paired, rows)


FORMS = {"fp8": Form(E4M3), "int8": Form(torch.int8), "fp8-blocks": Form(E4M3, 128)}


class Weights:
    """Codes of all shapes lie in one piece of memory, more than the L2 holds."""

    def __init__(self, form: Form) -> None:
        self.form = form
        size = max(ROTATE_BYTES, 2 * max(n * k for n, k in SHAPES))
        if form.dtype == torch.int8:
            self._codes = torch.randint(-127, 128, (size,), dtype=torch.int8, device="cuda")
        else:
            self._codes = torch.cat([random_e4m3(size // 16) for _ in range(16)])

    def of(self, n: int, k: int) -> list[EightBitWeight]:
        count = self._codes.numel() // (n * k)
        pieces = self._codes[: count * n * k].view(count, n, k)
        return [self.form.weight(piece, n == GATED) for piece in pieces]


def random_e4m3(count: int) -> Tensor:
    """None is NaN, which is what torch makes of numbers that are too large."""
    return (torch.randn(count, device="cuda") * 100).clamp(-448, 448).to(E4M3)


def differing(got: Tensor, want: Tensor) -> int:
    return int((got != want).sum().item())


# ------------------------------------------------------------ the library


def library_product(x: RoundedRows, w: EightBitWeight) -> Callable[[], Tensor] | None:
    """[m, n]: int32 sums, or floats times their scales; None: the library has none."""
    if w.is_int:
        return partial(torch._int_mm, x.codes, w.codes.t()) if len(x.codes) > 16 else None
    if w.group:
        return None
    return partial(
        torch._scaled_mm,
        *(x.codes, w.codes.t()),
        scale_a=x.scales,
        scale_b=w.scales,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )


def library_bits(x: RoundedRows, w: EightBitWeight, got: Tensor) -> str:
    """By which order of scales the library has our bits."""
    ones = RoundedRows(x.codes, torch.ones_like(x.scales))
    plain = replace(w, scales=torch.ones_like(w.scales), paired=False)
    tile = pick_eight_bit(len(x.codes), w.shape[0], 132)
    sums = eight_bit_matmul(ones, plain, None, torch.float32, tile)
    if w.is_int:
        return "sums equal" if torch.equal(got.float(), sums) else "SUMS DIFFER"
    orders = {
        "(sum x) w": (sums * x.scales) * w.scales,
        "(sum w) x": (sums * w.scales) * x.scales,
        "sum (x w)": sums * (x.scales * w.scales),
    }
    found = {name: differing(got, each.bfloat16()) for name, each in orders.items()}
    return " ".join(f"{name}: {count or 'equal'}" for name, count in found.items())


# ------------------------------------------------------------ the table

HEADER = (
    f"{'form':>11}{'weight':>14}{'rows':>6}{'us':>9}{'round':>7}{'tiled':>9}"
    f"{'x 128':>9}{'x 256':>9}{'library':>9}{'dense':>9}{'TB/s':>7}{'TFLOP/s':>8}"
)


def micros_of(calls: list[Callable[[], object]], floor: float) -> float:
    """Of launches that take `floor` microseconds or more; the first come last."""
    return graph_micros(calls[: max(1, min(len(calls), int(4000 / floor) + 1))])


def measure(
    name: str, weights: list[EightBitWeight], m: int, dense: bool, vendor: VendorEightBit
) -> tuple[str, bool]:
    form, (n, k) = FORMS[name], weights[0].shape
    gate = "silu" if n == GATED else None
    x = torch.randn(m, k, device="cuda").bfloat16()
    rounded = round_inputs(x, form.rounding)
    kernels = [EightBitLinear(w, form.rounding, None, gate, vendor) for w in weights]
    tile = pick_eight_bit(m, n, multiprocessors(x.device))
    by_tile = [partial(eight_bit_matmul, rounded, w, None, x.dtype, tile, gate) for w in weights]
    ours = [partial(kernel.multiply, rounded, x.dtype) for kernel in kernels]
    with rehearsal():
        ours[0]()
        by_tile[0]()
    wrong = differing(ours[0](), by_tile[0]())
    floor = max(n * k / 4e6, 2 * m * n * k / 1.2e9)
    micros = micros_of(ours, floor)
    line = f"{name:>11}{n:>8}x{k:<5}{m:>6}{micros:>9.1f}"
    line += f"{graph_micros([partial(round_inputs, x, form.rounding)] * 8):>7.1f}"
    line += f"{micros_of(by_tile, floor):>9.1f}"
    text, is_same = measure_many(weights, rounded, by_tile[0](), gate, floor)
    line, wrong = line + text, wrong + (not is_same)
    library, said = library_product(rounded, weights[0]), ""
    if library is None:
        line += f"{'-':>9}"
    else:
        try:
            said = library_bits(rounded, weights[0], library())
            products = [library_product(rounded, w) for w in weights]
            line += f"{micros_of([p for p in products if p], floor):>9.1f}"
        except RuntimeError as error:  # another version of torch may want other shapes
            line, said = line + f"{'-':>9}", str(error).splitlines()[0][:60]
    line += f"{dense_micros(n, k, x, gate, 2 * floor):>9.1f}" if dense else f"{'-':>9}"
    line += f"{n * k / micros / 1e6:>7.2f}{2 * m * n * k / micros / 1e6:>8.0f}"
    if kernels[0].library is not None and m > MOST_EIGHT_BIT_ROWS:
        said = f"taken {said}"
    return f"{line}  {f'BITS DIFFER ({wrong})' if wrong else ''} {said}", wrong == 0


def measure_many(
    weights: list[EightBitWeight], x: RoundedRows, want: Tensor, gate: str | None, floor: float
) -> tuple[str, bool]:
    """Of the kernel for many rows, and whether its bits are right."""
    from quire.kernels.many_eight_bit import ManyEightBit

    text, are_same = "", True
    for tile_n in (NARROW_TILE, WIDE_TILE):
        out = torch.empty_like(want)
        kernels = [ManyEightBit(w, None, gate) for w in weights]
        if tile_n not in kernels[0].tiles:
            text += f"{'-':>8} "
            continue
        products = [partial(kernel, x, out, tile_n) for kernel in kernels]
        products[0]()
        is_same = torch.equal(out, want)
        text += f"{micros_of(products, floor):>8.1f}{' ' if is_same else '!'}"
        are_same = are_same and is_same
    return text, are_same


def dense_micros(n: int, k: int, x: Tensor, gate: str | None, floor: float) -> float:
    count = max(1, ROTATE_BYTES // (2 * n * k))
    floats = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    layouts = Layouts()
    products = [PreparedMatmul(w, None, layouts, gate) for w in floats]
    return micros_of([partial(product, x) for product in products], floor)


def run(names: list[str], rows: list[int], max_seconds: float, dense: bool) -> int:
    deadline, wrong, vendor = time.monotonic() + max_seconds, 0, VendorEightBit()
    print(HEADER)
    for name in names:
        weights = Weights(FORMS[name])
        for n, k in SHAPES:
            for m in rows:
                if time.monotonic() > deadline:
                    print("out of time: the table is partial")
                    return wrong
                text, is_same = measure(name, weights.of(n, k), m, dense, vendor)
                wrong += not is_same
                print(text, flush=True)
    return wrong


# ------------------------------------------------------------ sizes


def candidates(m: int, n: int, k: int) -> list[StreamConfig]:
    block_m = next(size for size in (8, 16, 32, 64, 128) if m <= size)
    found = []
    for tile, rows in ((64, own_rows(n, H200.units)), (64, 64), (128, 128)):
        if rows is None or n % rows:
            continue
        for bands in (1, 2, 4):
            if k % (bands * CHAIN):
                continue
            most = min(8, (210 << 10) // ((tile + block_m) * bands * CHAIN), k // (bands * CHAIN))
            for stages in sorted({most, max(2, most // 2)}):
                for ahead in sorted({stages // 2, stages}):
                    if most >= 2:
                        config = StreamConfig(rows, block_m, bands * CHAIN, stages, ahead, tile)
                        found.append(config)
    return list(dict.fromkeys(found))


def sweep(names: list[str], rows: list[int], max_seconds: float) -> None:
    from quire.kernels.stream_eight_bit import StreamEightBit

    deadline = time.monotonic() + max_seconds
    for name in names:
        pieces = Weights(FORMS[name])
        for n, k in SHAPES:
            weights = pieces.of(n, k)
            gate = "silu" if n == GATED else None
            streams = [StreamEightBit(w, None, gate) for w in weights]
            for m in rows:
                if time.monotonic() > deadline:
                    print("out of time")
                    return
                x = round_inputs(torch.randn(m, k, device="cuda"), FORMS[name].rounding)
                out = torch.empty(m, n // 2 if gate else n, dtype=torch.bfloat16, device="cuda")
                picked, configs = pick_eight_bit_stream(m, n, k, H200), candidates(m, n, k)
                configs += [picked] if picked and picked not in configs else []
                with rehearsal():
                    for config in configs:
                        streams[0](x, out, config)
                times = {c: graph_micros([partial(s, x, out, c) for s in streams]) for c in configs}
                best = sorted(configs, key=times.__getitem__)[:3]
                told = f"picked {times[picked]:.1f} {_told(picked)}" if picked else "none picked"
                found = "; ".join(f"{times[c]:.1f} {_told(c)}" for c in best)
                print(f"{name:>11}{n:>8}x{k:<5}{m:>5}  {told}  best {found}", flush=True)


def _told(config: StreamConfig) -> str:
    return (
        f"{config.rows}/{config.tile}x{config.block_m} k{config.block_k}"
        f" s{config.num_stages} a{config.num_ahead}"
    )


# ------------------------------------------------------------ compiling


def compile_all(names: list[str], rows: list[int]) -> int:
    """Print a line for each kernel; returns how many failed or spilled."""
    become_compiler()
    bad = 0
    print(f"{'form':>11}{'rows':>6}{'way':>9}{'regs':>6}{'spill':>7}{'shared':>9}{'gmma':>6}")
    for name in names:
        for m in rows:
            for way in ("tiled", "streamed", "many 128", "many 256"):
                for gate in (None, "silu"):
                    if (kernel := build(name, m, way, gate)) is None:
                        continue
                    made = inspect(kernel)
                    is_bad = made.spilled > 0 or made.matrix == 0 or made.shared > SHARED_BYTES
                    bad += is_bad
                    print(
                        f"{name:>11}{m:>6}{way:>9}{made.registers:>6}{made.spilled:>7}"
                        f"{made.shared:>9,}{made.matrix:>6} {gate or ''}{' BAD' if is_bad else ''}",
                        flush=True,
                    )
    return bad


def build(name: str, m: int, way: str, gate: str | None) -> Any:
    """The kernel compiled for an H200; None: there is none for such rows."""
    form, (n, k) = FORMS[name], SHAPES[2 if m >= 64 else 1]
    weight = form.weight(torch.empty(n, k, dtype=form.dtype), gate is not None)
    scales = torch.empty(m, k // form.group if form.group else 1)
    x = RoundedRows(torch.empty(m, k, dtype=form.dtype), scales)
    if way == "tiled":
        compiling = Compiling(tiled, tiled._eight_bit_kernel)
        eight_bit_matmul(x, weight, None, torch.bfloat16, pick_eight_bit(m, n, 132), gate)
        return compiling.made
    out = torch.empty(m, n // 2 if gate else n, dtype=torch.bfloat16)
    if way.startswith("many"):
        from quire.kernels import many_eight_bit as many

        kernel, tile_n = many.ManyEightBit(weight, None, gate), int(way.split()[1])
        if tile_n not in kernel.tiles:
            return None
        compiling = Compiling(many, many.many_eight_bit_kernel)
        kernel(x, out, tile_n)
        return compiling.made
    config = pick_eight_bit_stream(m, n, k, H200)
    if config is None:
        return None
    from quire.kernels import stream_eight_bit as streamed

    compiling = Compiling(streamed, streamed.stream_eight_bit_kernel)
    streamed.StreamEightBit(weight, None, gate)(x, out, config)
    return compiling.made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--forms", default="fp8,int8", help=f"of {', '.join(FORMS)}")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--max-seconds", type=float, default=60.0)
    parser.add_argument("--no-dense", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--joints", action="store_true")
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    forms, rows = args.forms.split(","), [int(row) for row in args.rows.split(",")]
    if args.compile_only:
        bad = compile_joints() if args.joints else compile_all(forms, rows)
        return 1 if bad else 0
    if args.joints:
        pieces = {name: Weights(FORMS[name]) for name in forms}
        wrong = run_joints(forms, lambda name, n, k: pieces[name].of(n, k), args.max_seconds)
        return 1 if wrong else 0
    if args.sweep:
        sweep(forms, rows, args.max_seconds)
        return 0
    return 1 if run(forms, rows, args.max_seconds, not args.no_dense) else 0


if __name__ == "__main__":
    raise SystemExit(main())
