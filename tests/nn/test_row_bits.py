"""A row's bits are the same in any company, in every mode of the CPU library on this machine.

MKL takes other code on other CPUs. MKL_CBWR selects some of it, and brings out on one machine what
goes wrong on another.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch


@pytest.mark.parametrize("mode", ["", "COMPATIBLE", "AVX2"])
def test_rows_keep_their_bits_on_one_and_two_threads(mode: str) -> None:
    """Red when the library sees a part of a tile: rows, outputs or keys that are not padded."""
    env = {k: v for k, v in os.environ.items() if k not in ("MKL_CBWR", "OMP_NUM_THREADS")}
    if mode:
        env["MKL_CBWR"] = mode
    words = [sys.executable, "-m", "tests.nn.row_bits"]
    if mode == "AVX2" and torch.backends.cpu.get_cpu_capability() == "AVX512":
        words.append("products")  # torch's attention has AVX-512 in it: no machine mixes the two
    found = subprocess.run(words, env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout == ""
