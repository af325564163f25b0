"""Attention over caches of codes compiled for an H200 on a machine without one.

Another process compiles: in this one Triton's functions are the interpreter's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_products_sum_in_one_order() -> None:
    """Red when Triton gives operands made from codes another order than floats have, by which
    decode would not have the bits of prefill, and when decode spills much."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu_kv_cache", "--compile-only"]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [line.split() for line in run.stdout.splitlines()[1:]]
    assert {row[0] for row in rows} == {"plain", "int8", "fp8", "int4"}
    for form, kernel, _, spilled, _, widths in rows:
        assert widths == "2", (form, kernel)
        most = 0 if form == "plain" else 32  # bytes that a fourth program is worth
        assert int(spilled) <= most or kernel == "prefill", (form, kernel)
