"""Ways of multiplying few rows by int4 weights on Hopper, side by side, with their bits.

For every weight of an 8B model and every number of rows: microseconds of each way, by graph replay
over weights that rotate through more than the L2 holds, and whether its bits are the dense
kernel's. Every pair of a weight and a number of rows is a process of its own; one that stands still
is killed, and a new one goes on behind the way that hung. Prints a JSON line a way.

    python -m benchmarks.gpu_int4_study --seconds 85
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path

SHAPES = ((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False))
ROWS = (1, 32, 256, 16, 64, 128)  # what matters most comes first
STILL_S = 8.0  # without a line, a worker hangs


@dataclass(frozen=True, slots=True)
class Way:
    kernel: str  # "old", "one" or "turns"
    groups: int = 0  # that take turns
    sizes: tuple[int, ...] = ()  # of a StreamPackedConfig; empty: those that are picked
    is_light: bool = False  # two programs, or four of one group, fit a multiprocessor

    @property
    def name(self) -> str:
        return "/".join(
            map(str, (self.kernel + "-light" * self.is_light, self.groups, *self.sizes))
        )


def ways_of(n: int, k: int, m: int) -> list[Way]:
    block_m = max(8, 1 << (min(m, 128) - 1).bit_length())
    ways = [Way("old"), Way("one")]
    if n == 28672:
        if m <= 32:
            sizes = [
                (56, 64, 4, 2),
                (56, 64, 2, 3),
                (56, 64, 2, 2),
                (112, 128, 2, 3),
                (56, 64, 1, 4),
                (64, 64, 2, 2),
                (64, 64, 1, 3),
                (112, 128, 2, 2),
                (112, 128, 4, 2),
                (224, 256, 2, 2),
                (224, 256, 1, 3),
            ]
        elif m == 64:
            sizes = [
                (112, 128, 1, 2),
                (112, 128, 2, 2),
                (128, 128, 2, 2),
                (224, 256, 1, 2),
                (224, 256, 1, 3),
            ]
        else:
            sizes = [
                (128, 128, 1, 2),
                (128, 128, 1, 3),
                (128, 128, 2, 2),
                (224, 256, 1, 2),
                (64, 64, 1, 2),
                (64, 64, 2, 2),
            ]
        for rows, tile, slabs, stages in sizes:
            ways.append(Way("one", 0, (rows, tile, block_m, slabs, stages, 1)))
        if m == 256:
            ways.append(Way("one", 0, (128, 128, 256, 1, 2, 1)))
            ways.append(Way("rows", 2, (64, 64, 256, 1, 2, 1)))
        own = {8: ((4, 2, 4), (4, 2, 3), (4, 1, 6), (4, 4, 2), (2, 2, 3)),
               16: ((4, 2, 4), (4, 1, 6), (2, 2, 3)),
               32: ((4, 2, 3), (4, 2, 4), (4, 1, 6), (2, 2, 2)),
               64: ((4, 1, 5), (4, 2, 3), (2, 2, 4), (2, 1, 4)),
               128: ((2, 1, 4), (2, 1, 5), (2, 1, 2), (2, 2, 2))}[block_m]  # fmt: skip
        if block_m <= 32:
            light = [(1, 2, 2), (1, 1, 3), (1, 2, 3), (2, 2, 3), (2, 2, 2), (2, 1, 4)]
            for groups, slabs, stages in light:
                ways.append(Way("rows", groups, (56, 64, block_m, slabs, stages, 1), True))
        for groups, slabs, stages in own:
            rows = 64 if block_m == 128 else 56
            ways.append(Way("rows", groups, (rows, 64, block_m, slabs, stages, 1)))
        return ways
    rows = 48 if n == 6144 else 32
    tile = 64 if n == 6144 else 32
    if m <= 64:
        turns = {
            8: ((2, 4, 6), (2, 4, 8), (2, 2, 8), (3, 2, 9), (3, 4, 6), (3, 4, 8)),
            16: ((2, 4, 6), (2, 2, 8), (3, 2, 9), (3, 4, 6)),
            32: ((2, 4, 4), (2, 2, 6), (3, 2, 8), (3, 4, 4)),
            64: ((2, 2, 4), (2, 1, 6), (3, 1, 8), (3, 2, 5)),
        }[block_m]
        for groups, slabs, stages in turns:
            ways.append(Way("turns", groups, (rows, tile, block_m, slabs, stages, 1)))
            if tile == 32 and m <= 32 and (groups, slabs) == (2, 4):
                ways.append(Way("turns", groups, (64, 64, block_m, slabs, stages, 1)))
        light = {8: ((2, 6), (2, 8), (1, 8)), 16: ((2, 6), (1, 8)), 32: ((2, 4), (1, 8)),
                 64: ((1, 4), (1, 3))}[block_m]  # fmt: skip
        for slabs, stages in light:
            ways.append(Way("turns", 2, (rows, tile, block_m, slabs, stages, 1), True))
        if m == 1:
            ways.append(Way("rows", 1, (rows, tile, block_m, 2, 4, 1), True))
            ways.append(Way("rows", 1, (rows, tile, block_m, 4, 4, 1)))
    for slabs, stages in ((4, 3), (2, 3), (1, 3)):
        if block_m * slabs * stages <= 384:
            ways.append(Way("one", 0, (rows, tile, block_m, slabs, stages, 1)))
            ways.append(Way("one", 0, (64, 64, block_m, slabs, stages, 1)))
    if m >= 128:
        ways.append(Way("one", 0, (64, 64, 128, 2, 2, 1)))
        ways.append(Way("one", 0, (128, 128, 128, 1, 3, 1)))
        for sizes in ((64, 1, 3), (64, 1, 2), (64, 2, 2), (128, 1, 2)):
            ways.append(Way("one", 0, (64, 64, *sizes, 1)))
        ways.append(Way("turns", 2, (64, 64, 128, 2, 2, 1)))
        for sizes in ((64, 64, 64, 1, 4), (64, 64, 64, 2, 2), (64, 64, 64, 2, 3)):
            ways.append(Way("rows", 2, (*sizes, 1)))
        if n == 6144:
            ways.append(Way("rows", 2, (48, 64, 128, 1, 4, 1)))
            ways.append(Way("rows", 2, (48, 64, 128, 2, 2, 1)))
        for groups in (2, 3):
            ways.append(Way("turns", groups, (64, 64, 128, 1, 4, 1)))
    if m == 256:
        ways.append(Way("one", 0, (64, 64, 256, 1, 2, 1)))
    return [way for way in ways if not way.sizes or n % way.sizes[0] == 0]


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """One process at a time uses the GPU."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(**said: object) -> None:
    print(json.dumps(said), flush=True)


def work(shape: int, m: int, skip: list[str], lock: Path) -> None:
    import torch

    from benchmarks.gpu_matmul import ROTATE_BYTES, graph_micros
    from benchmarks.gpu_packed import FORMS
    from quire.kernels.matmul import interleave, matmul
    from quire.kernels.rehearsal import rehearsal
    from quire.kernels.stream_packed import StreamPacked
    from quire.kernels.stream_packed_configs import StreamPackedConfig
    from quire.kernels.stream_rows import StreamRows
    from quire.kernels.stream_turns import StreamTurns
    from quire.ops.slabs_of import slabs_of

    n, k, gated = SHAPES[shape]
    gate = "silu" if gated else None
    torch.manual_seed(7)
    torch.randn(64, device="cuda").exp().bfloat16().add(1.0)  # loads what the GPU needs
    with alone(lock):
        weight = FORMS["int4-g128"](n, k, "cuda")
        slabs = slabs_of(weight, gated, torch.bfloat16)
        assert slabs is not None and slabs.form.lanes
        dense = weight.dequantize().bfloat16()
        dense = interleave(dense) if gated else dense
        x = torch.randn(m, k, device="cuda") * torch.randn(m, k, device="cuda").exp()
        x = (x * k**-0.5).bfloat16()
        copies = [slabs]
        while len(copies) * slabs.num_bytes < ROTATE_BYTES:
            copies.append(replace(slabs, codes=slabs.codes.clone()))
        out = torch.empty(m, n // 2 if gated else n, dtype=x.dtype, device="cuda")
        torch.cuda.synchronize()
    products: dict[str, list[partial[None]]] = {}
    old = patched_old()
    for way in ways_of(n, k, m):
        if way.name in skip:
            continue
        made = []
        for each in copies:
            kernels = {"turns": StreamTurns, "rows": StreamRows}
            product = kernels.get(way.kernel, StreamPacked)(each, None, gate)
            if isinstance(product, (StreamTurns, StreamRows)):
                product.groups, product.is_light = way.groups, way.is_light
            call = partial(old, product) if way.kernel == "old" else product
            config = StreamPackedConfig(*way.sizes) if way.sizes else product.pick(m)
            made.append(partial(call, x, out, config))
        try:
            with rehearsal():
                made[0]()
            products[way.name] = made
        except Exception as error:  # one that does not build must not hide the others
            say(n=n, k=k, m=m, way=way.name, error=str(error)[-300:])
    with rehearsal():
        matmul(x, dense, gate=gate)
    with alone(lock):
        want = matmul(x, dense, gate=gate)
        torch.cuda.synchronize()
        for name, made in products.items():
            say(begin=name)
            out.fill_(float("nan"))
            try:
                made[0]()
                torch.cuda.synchronize()
                wrong = int((out != want).sum())
                micros = graph_micros(made, 5)
            except Exception as error:
                say(n=n, k=k, m=m, way=name, error=str(error)[-300:])
                raise
            config = made[0].args[-1]
            say(n=n, k=k, m=m, way=name, sizes=astuple(config), us=round(micros, 2), wrong=wrong)


def measure_chain(lock: Path) -> None:
    from benchmarks.int4_chain import measure

    with alone(lock):
        for line in measure():
            say(way="chain", wrong=int(not line["right"]), **line)


def patched_old():  # type: ignore[no-untyped-def]
    """The kernel as it was: a copy of its module with the unpacking as it was."""
    from benchmarks import int4_old_packed
    from quire.kernels.launch import Launcher

    launch = Launcher(int4_old_packed.stream_packed_kernel)

    def call(product, x, out, config):  # type: ignore[no-untyped-def]
        launch(*product.plan(x, out, config))

    return call


def watch(shape: int, m: int, lock: Path, deadline: float) -> int:
    """Run one pair to its end; returns how many ways failed."""
    skip: list[str] = []
    bad = 0
    while time.monotonic() < deadline:
        words = ["--worker", f"{shape},{m}", "--lock", str(lock), "--skip", ",".join(skip)]
        command = [sys.executable, "-m", "benchmarks.gpu_int4_study", *words]
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            worker = subprocess.Popen(command, stdout=out, stderr=err, env=dict(os.environ))
            size, since = 0, time.monotonic()
            began = False
            while worker.poll() is None:
                time.sleep(0.2)
                now = os.fstat(out.fileno()).st_size
                if now != size:
                    size, since = now, time.monotonic()
                    began = os.pread(out.fileno(), now, 0).splitlines()[-1].startswith(b'{"begin')
                is_still = began and time.monotonic() - since > STILL_S
                if is_still or time.monotonic() > deadline:
                    worker.kill()
                    worker.wait()
            out.seek(0)
            lines = [json.loads(line) for line in out if line.startswith("{")]
            running = ""
            for line in lines:
                running = line.get("begin", running)
                if "way" in line:
                    skip.append(line["way"])
                    bad += "error" in line or line["wrong"] > 0
                    print(json.dumps(line), flush=True)
            if worker.returncode == 0:
                return bad
            err.seek(0)
            tail = err.read()[-400:]
            print(json.dumps({"shape": shape, "m": m, "died": running, "tail": tail}), flush=True)
            bad += 1
            if not running:
                return bad
            if running not in skip:
                skip.append(running)
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=85.0)
    parser.add_argument("--worker", default="")
    parser.add_argument("--lock", default="")
    parser.add_argument("--skip", default="")
    args = parser.parse_args()
    if args.worker:
        shape, m = map(int, args.worker.split(","))
        if m == 0:
            measure_chain(Path(args.lock))
            return 0
        work(shape, m, args.skip.split(","), Path(args.lock))
        return 0
    deadline = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(16) as threads:
        lock = Path(folder) / "gpu"
        lock.touch()
        pairs = [(shape, m) for m in ROWS for shape in (3, 2, 0, 1)] + [(0, 0)]
        bad = sum(threads.map(lambda pair: watch(*pair, lock, deadline), pairs))
    print(json.dumps({"bad": bad}))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
