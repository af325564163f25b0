"""Products with packed weights: do they build, have the dense kernel's bits, and how fast are they?

Without a GPU every form is compiled for an H200, and what the assembler says is shown: registers of
a thread, bytes that spilled, shared memory, matrix instructions, and stores into shared memory from
the loop (unpacked weights that had to change threads). On a GPU products are compared with the
dense kernel on the expanded weight bit for bit, and timed by graph replay beside it.

    python -m benchmarks.gpu_packed --compile-only          # no GPU needed
    python -m benchmarks.gpu_packed --forms int4-g128,fp8 --rows 1,32,64 --max-seconds 120
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.driver import make_launcher

from benchmarks.gpu_matmul import ROTATE_BYTES, SHARED_BYTES, become_compiler, graph_micros
from quire.kernels import (
    expand,
    grouped_packed,
    sparse_turns,
    stream_packed,
    stream_sparse,
    stream_turns,
)
from quire.kernels import packed_matmul as packed_matmul_module
from quire.kernels.chip import H200
from quire.kernels.matmul import Layouts, PreparedMatmul, matmul
from quire.kernels.packed_matmul import packed_matmul, pick_packed
from quire.kernels.rehearsal import outline
from quire.kernels.route import SortedPairs
from quire.kernels.slabs import Slabs
from quire.kernels.stream_packed_configs import stream_packed_ways, words_of
from quire.kernels.stream_sparse_configs import stream_sparse_ways
from quire.ops.packed_linear import streamed
from quire.ops.slabs_of import slabs_of
from quire.quant.coded import Coded
from quire.quant.gguf_codes import IQ4_VALUES
from quire.quant.load_forms import E2M1_TABLE, load_form
from quire.quant.scaled import Scaled
from quire.quant.sparse24 import Sparse24
from quire.quant.weight import Weight

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # of Llama-3.1-8B
ROWS = (1, 16, 32, 64, 128)
WAYS = ("plain", "gated", "experts", "expand", "stream", "turns", "half-turns")
STREAMED = {
    "stream": 8,
    "turns": 8,
    "half-turns": 16,
}  # and the multiprocessors that share 512 rows


def _codes(bits: int, n: int, k: int, device: str) -> Tensor:
    return torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, device=device)


def _loaded(name: str, n: int, k: int, device: str) -> Weight:
    weight = load_form(name).of(torch.randn(n, k, device=device) * 0.02)
    assert weight is not None
    return weight


def _blocks(
    bits: int, zero: int, n: int, k: int, device: str, *, has_offsets: bool = False
) -> Weight:
    scales = (torch.rand(n, k // 32, device=device) * 0.01).half()
    offsets = -scales if has_offsets else None
    return Coded(_codes(bits, n, k, device), bits, 32, scales, zero, offsets)


def _two_bits(n: int, k: int, device: str) -> Weight:
    """In groups of 64 with zeros of their own."""
    scales = (torch.rand(n, k // 64, device=device) * 0.01).half()
    zeros = torch.randint(0, 4, scales.shape, dtype=torch.uint8, device=device)
    return Coded(_codes(2, n, k, device), 2, 32, scales, share=2, zeros=zeros)


def _ternary(n: int, k: int, device: str) -> Weight:
    """BitNet's: -1, 0 and 1 times one number."""
    codes = torch.randint(0, 3, (n, k), dtype=torch.uint8, device=device)
    scales = torch.full((n, 1), 0.02, device=device)
    return Coded(codes, 2, 32, scales, 1, share=k // 32)


def _iq4(n: int, k: int, device: str) -> Weight:
    scales = (torch.rand(n, k // 32, device=device) * 0.001).half()
    return Coded(_codes(4, n, k, device), 4, 32, scales, table=IQ4_VALUES)


def _e5m2(n: int, k: int, device: str) -> Weight:
    floats = torch.randn(n, k, device=device).to(torch.float8_e5m2)
    return Scaled(floats, torch.rand(n, 1, device=device) * 0.01, (1, k))


def _k_quant(bits: int, block: int, has_offsets: bool, n: int, k: int, device: str) -> Weight:
    most = 16 if bits == 2 else 32 if bits == 3 else 64
    small = partial(torch.randint, 0, most, (n, k // block), device=device)
    dtype = torch.uint8 if has_offsets else torch.int8
    size = 256 // block
    above = (torch.rand(n, k // 256, device=device) * 0.001).half()
    return Coded(
        *(_codes(bits, n, k, device), 4 if bits == 3 else bits),
        *(block, small(dtype=dtype)),
        zero=0 if has_offsets else 2 ** (bits - 1),
        offsets=small(dtype=dtype) if has_offsets else None,
        super_size=size,
        super_scales=above,
        super_offsets=-above if has_offsets else None,
    )


def _nvfp4(n: int, k: int, device: str) -> Weight:
    eighths = torch.randint(0x30, 0x7F, (n, k // 16), dtype=torch.uint8, device=device)
    above = torch.full((n, 1), 3000.0, device=device)
    whole = _codes(4, n, k, device)
    return Coded(whole, 4, 16, eighths, super_scales=above, table=E2M1_TABLE, eighths="over")


def _codebook(n: int, k: int, device: str) -> Weight:
    values = torch.randint(-127, 128, (-(-n // 4), 16), dtype=torch.int8, device=device)
    scales = (torch.rand(n, k // 128, device=device) * 1e-3).half()
    tables = values.sort(1).values.repeat_interleave(4, 0)[:n]
    return Coded(_codes(4, n, k, device), 4, 32, scales, tables=tables, share=4)


def _fp8_blocks(n: int, k: int, device: str) -> Weight:
    floats = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-n // 128), -(-k // 128), device=device) * 0.01
    return Scaled(floats, scales, (128, 128))


def _sparse(n: int, k: int, device: str) -> Weight:
    values = torch.randn(n, k // 2, device=device).bfloat16()
    pairs = torch.combinations(torch.arange(4, dtype=torch.uint8, device=device))
    chosen = pairs[torch.randint(len(pairs), (n, k // 4), device=device)]
    return Sparse24(values, chosen[..., 0] | chosen[..., 1] << 2)


FORMS: dict[str, Callable[[int, int, str], Weight]] = {
    "int4-g128": partial(_loaded, "rtn-int4-g128"),
    "int4-g128-asym": partial(_loaded, "rtn-int4-g128-asym"),
    "int4-g32-asym": partial(_loaded, "rtn-int4-g32-asym"),
    "int8": partial(_loaded, "int8"),
    "fp8": partial(_loaded, "fp8"),
    "fp8-blocks": _fp8_blocks,
    "nf4": partial(_loaded, "nf4"),
    "mxfp4": partial(_loaded, "mxfp4"),
    "e5m2": _e5m2,
    "int8-g32-asym": partial(_loaded, "rtn-int8-g32-asym"),
    "int2-g64-asym": _two_bits,
    "int3-g32": partial(_blocks, 3, 4),
    "ternary": _ternary,
    "Q4_0": partial(_blocks, 4, 8),
    "Q8_0": partial(_blocks, 8, 0),
    "Q4_1": partial(_blocks, 4, 0, has_offsets=True),
    "Q5_0": partial(_blocks, 5, 16),
    "Q5_1": partial(_blocks, 5, 0, has_offsets=True),
    "IQ4_NL": _iq4,
    "Q2_K": partial(_k_quant, 2, 16, True),
    "Q3_K": partial(_k_quant, 3, 16, False),
    "nvfp4": _nvfp4,
    "Q4_K": partial(_k_quant, 4, 32, True),
    "Q5_K": partial(_k_quant, 5, 32, True),
    "Q6_K": partial(_k_quant, 6, 16, False),
    "codebook": _codebook,
    "2:4": _sparse,
}


@dataclass(frozen=True, slots=True)
class Built:
    """What the assembler says of a kernel."""

    registers: int
    spilled: int  # bytes of a thread's own memory
    shared: int
    matrix: int  # instructions of the warp group's matrix unit
    stores: int  # into shared memory


class Compiling:
    """Stands in for a launcher: compiles what it would launch."""

    def __init__(self, module: Any, kernel: Any, name: str = "_launch") -> None:
        self.kernel, self.made = kernel, None
        setattr(module, name, self)

    def __call__(
        self, grid: object, args: tuple[object, ...], options: Mapping[str, object], kind: object
    ) -> None:
        early = {"EARLY": True, "launch_pdl": True} if "EARLY" in options else {}
        outlines = map(outline, args)  # whatever the machine that compiles
        self.made = self.kernel.warmup(*outlines, grid=grid, **{**options, **early})


def build(form: str, rows: int, way: str) -> Built | None:
    """The kernel of a form at some rows of x, compiled for an H200; None: it is not streamed. In a
    process that calls `become_compiler` first."""
    n, k, experts = 512, 4096 if way in STREAMED else 1024, 4
    weight = FORMS[form](n, k, "cpu")
    slabs = slabs_of(weight, way == "gated", torch.bfloat16 if way in STREAMED else None)
    assert slabs is not None
    x = torch.empty(rows, k, dtype=torch.bfloat16)
    if way in STREAMED:
        return build_streamed(slabs, x, way)
    if way == "expand":
        compiling = Compiling(expand, expand._expand_kernel)
        expand.expand(slabs, torch.empty(n, k, dtype=torch.bfloat16))
    elif way == "experts":
        compiling = Compiling(grouped_packed, grouped_packed._grouped_packed_kernel)
        pairs = SortedPairs(torch.zeros(rows).int(), torch.zeros(experts).int(), 1)
        grouped_packed.multiply_packed(x, slabs, pairs, None, is_gather=True)
    else:
        compiling = Compiling(packed_matmul_module, packed_matmul_module.packed_kernel)
        tile = replace(pick_packed(rows, n, 1), portion=64)
        packed_matmul(x, slabs, tile=tile, gate="silu" if way == "gated" else None)
    return inspect(compiling.made)


def build_streamed(slabs: Slabs, x: Tensor, way: str) -> Built | None:
    """None: such a form or as many rows of x take another kernel."""
    if not slabs.form.lanes:
        return None
    compiling = compiling_of(slabs.form.kind == "2:4", way != "stream")
    chip = H200._replace(units=STREAMED[way])
    if slabs.scales is None:
        ways = stream_sparse_ways(len(x), slabs.shape, chip)
    else:
        form, k = slabs.form, slabs.shape[1]
        of_form = (form.bits, form.fields)
        ways = stream_packed_ways(len(x), slabs.shape, words_of(form, k), chip, *of_form)
    configs = [config for config in ways if config.in_turns == (way != "stream")]
    product = streamed(slabs, None, None)
    assert product is not None
    for config in configs:
        product(x, torch.empty(len(x), slabs.shape[0], dtype=x.dtype), config)
    return inspect(compiling.made) if configs else None


def compiling_of(is_sparse: bool, in_turns: bool) -> Compiling:
    """In place of the launcher of a streaming kernel."""
    if in_turns and is_sparse:
        return Compiling(sparse_turns, sparse_turns.sparse_turns_kernel, "launch")
    if in_turns:
        return Compiling(stream_turns, stream_turns.stream_turns_kernel, "launch")
    if is_sparse:
        return Compiling(stream_sparse, stream_sparse.stream_sparse_kernel)
    return Compiling(stream_packed, stream_packed.stream_packed_kernel)


def inspect(kernel: Any) -> Built:
    # What the driver is handed is made of the arguments' kinds: it does not take all that compile.
    make_launcher(kernel.src.constants, kernel.src.signature, kernel.metadata.tensordesc_meta)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True)
            for flag in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage.stdout)
    assert found is not None, usage.stdout
    registers, stack, local = map(int, found.groups())
    return Built(
        registers,
        stack + local,
        kernel.metadata.shared,
        len(re.findall(r"\b[HIQ]GMMA\b", code.stdout)),
        len(re.findall(r"\bSTS\b", code.stdout)),
    )


def compile_all(forms: list[str], rows: list[int], ways: list[str]) -> int:
    """Print a line for each; returns how many failed or spilled."""
    become_compiler()
    bad = 0
    print(f"{'form':>16}{'rows':>6}{'way':>11}{'regs':>6}{'spill':>7}{'shared':>9}{'hgmma':>7} STS")
    for form in forms:
        for m in rows:
            for way in WAYS:
                if (ways and way not in ways) or (way == "expand" and m != rows[0]):
                    continue
                try:
                    made = build(form, m, way)
                except Exception as error:  # a form that does not build must not hide the others
                    print(f"{form:>16}{m:>6}  does not compile: {str(error)[-300:]}")
                    bad += 1
                    continue
                if made is None:
                    continue
                bad += made.spilled > 0 or (made.matrix == 0 and way != "expand")
                bad += made.shared > SHARED_BYTES
                print(
                    f"{form:>16}{m:>6}{way:>11}{made.registers:>6}{made.spilled:>7}"
                    f"{made.shared:>9,}{made.matrix:>7}{made.stores:>4}",
                    flush=True,
                )
    return bad


def measure(form: str, n: int, k: int, m: int) -> tuple[str, bool]:
    """A line of the table, and whether the bits are the dense kernel's."""
    weight = FORMS[form](n, k, "cuda")
    slabs = slabs_of(weight)
    assert slabs is not None
    copies = [slabs] * 1
    while len(copies) * slabs.num_bytes < ROTATE_BYTES:
        tensors = {"codes": slabs.codes.clone()}
        copies.append(replace(slabs, **tensors))
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    dense = weight.dequantize().bfloat16()
    is_same = torch.equal(packed_matmul(x, slabs), matmul(x, dense))
    packed = graph_micros([partial(packed_matmul, x, each) for each in copies])
    floats = [dense] + [dense.clone() for _ in range(max(0, ROTATE_BYTES // (2 * n * k)))]
    products = [PreparedMatmul(w, None, Layouts()) for w in floats]
    plain = graph_micros([partial(product, x) for product in products])
    rate = slabs.num_bytes / packed / 1e6
    text = f"{form:>16}{n:>7}x{k:<6}{m:>5}{packed:>9.1f}{plain:>9.1f}{rate:>8.2f}"
    return text + ("" if is_same else "  BITS DIFFER"), is_same


def run(forms: list[str], rows: list[int], max_seconds: float) -> int:
    deadline, wrong = time.monotonic() + max_seconds, 0
    print(f"{'form':>16}{'weight':>14}{'rows':>5}{'packed us':>10}{'dense us':>9}{'TB/s':>7}")
    for form in forms:
        for n, k in SHAPES:
            for m in rows:
                if time.monotonic() > deadline:
                    print("out of time: the table is partial")
                    return wrong
                text, is_same = measure(form, n, k, m)
                wrong += not is_same
                print(text, flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--max-seconds", type=float, default=240.0)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--ways", default="", help=", ".join(WAYS))
    args = parser.parse_args()
    forms, rows = args.forms.split(","), [int(row) for row in args.rows.split(",")]
    if args.compile_only:
        return 1 if compile_all(forms, rows, [w for w in args.ways.split(",") if w]) else 0
    return 1 if run(forms, rows, args.max_seconds) else 0


if __name__ == "__main__":
    raise SystemExit(main())
