"""One round of all that is measured on a GPU: jobs one behind the other, until the time is over.

    python -m benchmarks.gpu_round --list
    python -m benchmarks.gpu_round --seconds 570 --out out            # the first that fit
    python -m benchmarks.gpu_round --seconds 570 --out out --from tiers
    python -m benchmarks.gpu_round --only lora,spec --out out

Each job is a process with a limit of its own; what it prints is in `out/NAME.log`. A job that fails
or hangs costs its own time alone, and none is begun that may not end in time. Prints a line a job
and the JSON lines they printed. `--packages DIR` goes in front of PYTHONPATH, for the server's;
with pytest-xdist among them tests run on all cores, which they need: alone they take ten minutes.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

SUMMING_UP_S = 10.0


class Job(NamedTuple):
    name: str
    limit_s: int
    words: tuple[str, ...]  # behind `python`


# `quire bench costs` of a shape with random weights; the table lies beside the logs.
COSTS = """
import sys, tempfile
from pathlib import Path
from quire.bench.shapes import SHAPES, write_shape
from quire.cli.main import main
name, out = sys.argv[1:]
folder = write_shape(SHAPES[name], Path(tempfile.mkdtemp()) / name)
sys.exit(main(["bench", "costs", folder, "--load-format", "dummy", "--max-model-len", "9216",
               "--out", f"{out}/costs-{name}.json"]))
"""


def bench(name: str, *words: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.{name}", *words)


def quire(*words: str) -> tuple[str, ...]:
    return ("-m", "quire", *words)


JOBS = (
    Job("tests", 300, ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu")),
    Job("packed", 320, quire("bench", "h200", "--rows",
                             "packed-int4,packed-fp8,packed-int8,packed-sparse24")),
    Job("served-8b", 170, bench("gpu_served", "8b")),
    Job("served-0.6b", 120, bench("gpu_served", "0.6b")),
    Job("tiers", 200, bench("gpu_tiers", "8b")),
    Job("lora", 120, bench("gpu_lora")),
    Job("spec", 150, bench("gpu_speculation", "--rounds", "1")),
    Job("heads", 115, bench("gpu_heads")),
    Job("moe-fp8", 120, bench("gpu_shapes", "qwen3-30b-a3b", "1x128", "32x128", "128x128",
                              "--quantization", "fp8")),
    Job("moe-mxfp4", 120, bench("gpu_shapes", "gpt-oss-20b", "1x128", "32x128", "128x128",
                                "--quantization", "mxfp4")),
    Job("costs-8b", 100, ("-c", COSTS, "8b", "{out}")),
    Job("costs-0.6b", 60, ("-c", COSTS, "0.6b", "{out}")),
    Job("quantize", 400, bench("gpu_quantize", "1.5b:gptq", "8b:rtn")),
    Job("codes", 80, bench("gpu_kv_cache")),
    Job("w8a8", 90, bench("gpu_w8a8", "--max-seconds", "60")),
    Job("products", 140, bench("gpu_packed", "--max-seconds", "120")),
    Job("streamed", 60, bench("gpu_stream_packed", "--max-seconds", "45")),
)  # fmt: skip


def run(job: Job, out: Path, env: dict[str, str]) -> tuple[str, float]:
    log, begun = out / f"{job.name}.log", time.monotonic()
    words = [str(out) if word == "{out}" else word for word in job.words]
    if "pytest" in words and "PYTHONPATH" in env:
        is_wide = any(
            Path(folder, "xdist").is_dir() for folder in env["PYTHONPATH"].split(os.pathsep)
        )
        words += ["-n", "10", "--dist", "loadfile"] if is_wide else []
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *words], stdout=file, stderr=subprocess.STDOUT, env=env
        )
        try:
            code = process.wait(job.limit_s)
            state = "ok" if code == 0 else f"exit {code}"
        except subprocess.TimeoutExpired:
            state = f"stopped after {job.limit_s} s"
            process.send_signal(signal.SIGINT)  # whoever sums up may do so
            try:
                process.wait(SUMMING_UP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return state, time.monotonic() - begun


def chosen(args: argparse.Namespace) -> list[Job]:
    names = [job.name for job in JOBS]
    asked = args.only.split(",") if args.only else names
    unknown = {*asked, args.first or names[0]} - set(names)
    if unknown:
        raise SystemExit(f"no job {', '.join(sorted(unknown))}; known: {', '.join(names)}")
    begin = names.index(args.first) if args.first else 0
    return [job for job in JOBS[begin:] if job.name in asked]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seconds", type=float, default=570.0, help="for all of them")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")))
    parser.add_argument("--only", help="names, with commas between")
    parser.add_argument("--from", dest="first", help="begin with this one")
    parser.add_argument("--packages", help="a folder for PYTHONPATH")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    jobs = chosen(args)
    if args.list:
        for job in jobs:
            shown = " ".join(word for word in job.words if word != COSTS)
            print(f"{job.name:12} {job.limit_s:4} s  python {shown}")
        return
    env = dict(os.environ)
    if args.packages:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (args.packages, env.get("PYTHONPATH"))))
    args.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + args.seconds
    for job in jobs:
        if time.monotonic() + job.limit_s > ends:
            print(f"{job.name}: not begun, it may take {job.limit_s} s", flush=True)
            continue
        state, seconds = run(job, args.out, env)
        print(f"{job.name}: {state}, {seconds:.0f} s", flush=True)
        lines = (args.out / f"{job.name}.log").read_text(errors="replace").splitlines()
        shown = [line for line in lines if line.startswith(("{", "FAILED"))] or lines[-3:]
        print("\n".join(shown), flush=True)


if __name__ == "__main__":
    main()
