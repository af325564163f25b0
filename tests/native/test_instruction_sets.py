"""The same bits on every instruction set and every architecture, odd numbers included.

`bits.c` runs the kernels, `lanes.c` the operations they are made of. The other architecture is
emulated, where an emulator and a cross compiler are at hand. AMX, which few CPUs have, is computed
in C (`emulated_tiles.h`) by any that has the vectors it works with.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from pathlib import Path

import pytest

from quire.native import build
from quire.native.check import agrees_with_plain
from quire.native.library import Library
from tests.native.programs import HERE, Machine, emulated_arm, this_machine

COUNTED = 50  # digests of bits.c at least: a program that stops early has not passed


def kernel_lines(machine: Machine, library: Path, folder: Path) -> tuple[list[str], list[str]]:
    """The sets that ran, each found equal to plain C, and the digests of plain C's results."""
    linked = (str(library), f"-Wl,-rpath,{library.parent}", "-lpthread")
    sets, *digests = machine.run(folder, "bits.c", *linked)
    assert len(digests) > COUNTED
    return sets.split()[1:], digests


def lanes_line(machine: Machine, isa: str, folder: Path) -> list[str]:
    return machine.run(folder, "lanes.c", *build.COPIES[machine.name][isa], "-O1")


emulated = pytest.mark.skipif(
    not os.environ.get("QUIRE_LONG_TESTS"), reason="emulated, takes a minute: QUIRE_LONG_TESTS=1"
)


def test_kernels_of_this_machine(library: Library, tmp_path: Path) -> None:
    """Red when a kernel's bits follow the instruction set, also where numbers are odd."""
    sets, _ = kernel_lines(this_machine(), build.ensure_built(), tmp_path)
    assert tuple(sets) == library.isas


def test_operations_of_this_machine(library: Library, tmp_path: Path) -> None:
    """Red when an operation on lanes treats NaN, infinities or ties as plain C does not."""
    machine = this_machine()
    if machine.name not in build.COPIES:
        pytest.skip(f"{machine.name} has plain C alone")
    want = lanes_line(machine, "plain", tmp_path)
    for isa in library.isas:
        assert lanes_line(machine, isa, tmp_path) == want, isa


@emulated
def test_kernels_of_arm(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when ARM computes other bits than this machine, or one of its sets other than another."""
    arm, here = emulated_arm(), this_machine()
    _, want = kernel_lines(here, build.ensure_built(), tmp_path)
    sets, got = kernel_lines(arm, arm.library(monkeypatch), tmp_path)
    assert sets == ["i8mm", "dotprod", "neon", "plain"]
    assert got == want


def test_operations_of_arm(tmp_path: Path) -> None:
    """Red when an ARM instruction stands for an x86 one that rounds or compares otherwise."""
    arm, here = emulated_arm(), this_machine()
    if here.name not in build.COPIES:
        pytest.skip(f"{here.name} has plain C alone")
    want = lanes_line(here, "plain", tmp_path)
    for isa in build.COPIES["aarch64"]:
        assert lanes_line(arm, isa, tmp_path) == want, isa


@pytest.fixture
def emulated_amx(library: Library, monkeypatch: pytest.MonkeyPatch) -> Path:
    if "avx512vnni" not in library.isas:
        pytest.skip("AMX cannot be emulated here: it works with AVX-512's vectors")
    copies = {"plain": build.PLAIN, "amx": (*build.AVX2, *build.AVX512)}
    monkeypatch.setattr(build, "COPIES", {build.machine(): copies})
    tiles = HERE / "emulated_tiles.h"
    stamp = hashlib.sha256(tiles.read_bytes()).hexdigest()  # flags are in the name of what is kept
    flags = ("-O1", f'-DQUIRE_TILES="{tiles}"', f'-DSTAMP="{stamp}"')
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, *flags))
    return build.ensure_built()


@emulated
def test_amx(library: Library, tmp_path: Path, emulated_amx: Path) -> None:
    """Red when AMX's products, or those of rows beside them, have other bits than plain C's, and
    when the check at startup does not see that a matrix unit is wrong."""
    sets, _ = kernel_lines(this_machine(), emulated_amx, tmp_path)
    assert sets == ["amx", "plain"]
    own = Library(emulated_amx)
    own.set_threads(1)
    own.use_isa("amx")
    assert agrees_with_plain(own, "amx")
    ctypes.c_int.in_dll(ctypes.CDLL(str(emulated_amx)), "tiles_are_broken").value = 1
    assert not agrees_with_plain(own, "amx")
