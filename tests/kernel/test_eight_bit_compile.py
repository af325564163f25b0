"""Kernels that round what they make, compiled for an H200 on a machine without one.

Another process compiles: in this one Triton's functions are the interpreter's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_they_build_and_sum_in_the_order_of_the_norm() -> None:
    """Red when registers run out, or a norm that rounds spreads a row over threads otherwise than
    the norm whose bits it must have: its sum would be another."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu_w8a8", "--joints", "--compile-only"]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(" 0 bytes spilled\n") == 38
