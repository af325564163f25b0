"""C programs that drive the native library, on this machine or on an emulated one."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.native import build

HERE = Path(__file__).parent
ARM_CC, ARM_ROOT = "aarch64-linux-gnu-gcc", Path("/usr/aarch64-linux-gnu")


@dataclass(frozen=True)
class Machine:
    """Where programs are compiled for and how they are run there."""

    name: str  # as in build.COPIES
    compiler: tuple[str, ...]
    runner: tuple[str, ...] = ()

    def library(self, patch: pytest.MonkeyPatch) -> Path:
        """The native library for this machine, built by the project's own steps and kept."""
        patch.setattr(build, "machine", lambda: self.name)
        patch.setattr(build, "find_compiler", lambda: self.compiler)
        patch.setattr(build, "FLAGS", (*build.FLAGS, "-O1"))  # a third of the time; the same bits
        return build.ensure_built()

    def run(self, folder: Path, source: str, *flags: str) -> list[str]:
        """The lines a program of this folder prints; it must end well."""
        made = folder / f"{self.name}-{Path(source).stem}"
        common = ("-std=gnu11", "-O1", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Werror")
        include = f"-I{build.SOURCES}"
        command = (*self.compiler, *common, include, str(HERE / source), *flags, "-o", str(made))
        subprocess.run((*command, "-lm"), check=True)
        done = subprocess.run((*self.runner, str(made)), capture_output=True, text=True)
        wrong = [line for line in done.stdout.splitlines() if line.startswith("WRONG")]
        assert done.returncode == 0, (wrong[:5], done.stderr)
        return done.stdout.splitlines()


def this_machine() -> Machine:
    if (compiler := build.find_compiler()) is None:
        pytest.skip("no C compiler")
    return Machine(build.machine(), compiler)


def emulated_arm() -> Machine:
    """An ARM CPU with every instruction set that there are kernels for."""
    found = [name for name in ("qemu-aarch64", "qemu-aarch64-static") if shutil.which(name)]
    missing = [] if found else ["qemu-aarch64 (Debian: qemu-user)"]
    if not shutil.which(ARM_CC) or not ARM_ROOT.is_dir():
        missing.append(f"{ARM_CC} (Debian: gcc-aarch64-linux-gnu)")
    if missing:
        pytest.skip(f"ARM cannot be emulated here: {' and '.join(missing)} not found")
    return Machine("aarch64", (ARM_CC,), (found[0], "-cpu", "max", "-L", str(ARM_ROOT)))
