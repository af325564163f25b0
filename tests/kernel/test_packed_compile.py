"""Packed kernels compiled for an H200 on a machine without one, as far as that tells anything.

Another process compiles: in this one Triton's functions are the interpreter's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONG = os.environ.get("QUIRE_LONG_TESTS") == "1"


def compiled(*flags: str, module: str = "gpu_packed") -> str:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"benchmarks.{module}", "--compile-only", *flags]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_int4_is_unpacked_in_registers() -> None:
    """Red when the kernel does not build, spills, misses the matrix unit, or moves unpacked weights
    through shared memory."""
    _, line = compiled("--forms", "int4-g128", "--rows", "1", "--ways", "plain").splitlines()
    form, _, _, registers, spilled, _, matrix, stores = line.split()
    assert form == "int4-g128" and int(registers) <= 255 and int(matrix) > 0
    assert (int(spilled), int(stores)) == (0, 0)


def test_sums_in_turns_build() -> None:
    """Red when a group that takes turns does not build, spills, or misses the matrix unit."""
    _, *lines = compiled("--forms", "int4-g128", "--rows", "32", "--ways", "turns").splitlines()
    assert [line.split()[:3] for line in lines] == [["int4-g128", "32", "turns"]]


def test_two_of_four_are_unpacked_in_registers() -> None:
    """Red when a kernel of 2:4 weights does not build, spills, misses the matrix unit, or moves
    weights through shared memory (in turns, sums do)."""
    _, *lines = compiled("--forms", "2:4", "--rows", "1", "--ways", "stream,turns").splitlines()
    stream, turns = (line.split() for line in lines)
    assert stream[:3] == ["2:4", "1", "stream"] and turns[:3] == ["2:4", "1", "turns"]
    assert (int(stream[4]), int(stream[7])) == (0, 0) and int(stream[6]) > 0


def test_experts_of_eight_bits_build() -> None:
    """Red when the grouped W8A8 kernel does not build, spills, or misses the matrix unit."""
    lines = compiled(
        "--forms", "fp8-blocks", "--tokens", "32,2048", module="gpu_experts"
    ).splitlines()
    assert len(lines) == 5 and all(line.split()[0] == "fp8-blocks" for line in lines[1:])


@pytest.mark.skipif(not LONG, reason="some minutes; QUIRE_LONG_TESTS=1 runs it")
def test_every_form_and_tile_builds_without_spills() -> None:
    assert "does not compile" not in compiled()


@pytest.mark.skipif(not LONG, reason="half a minute; QUIRE_LONG_TESTS=1 runs it")
def test_every_tile_of_eight_bit_experts_builds_without_spills() -> None:
    assert " BAD" not in compiled("--tokens", "1,500,1000,2048", module="gpu_experts")
