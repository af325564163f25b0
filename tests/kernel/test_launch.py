"""Launcher: what a kept variant hands the driver is what Triton's own launcher would."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher

from quire.kernels.launch import KNOWN_VERSIONS, Launcher, ceil_div, pad_to_power

STREAM, FUNCTION, METADATA = 77, 88, ("packed",)
GRID, ARGS, CONSTANTS = (5, 6, 7), ("x", "y", 3), {"BLOCK": 128, "EARLY": True, "num_warps": 4}


def triton_launcher(scratch: int) -> tuple[Any, list[tuple[object, ...]]]:
    """Triton's class around a driver that notes what it is given."""
    given: list[tuple[object, ...]] = []
    run = object.__new__(CudaLauncher)
    run.launch = lambda *args: given.append(args)
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, True
    run.global_scratch_size, run.global_scratch_align = scratch, 16
    run.profile_scratch_size, run.profile_scratch_align = 0, 1
    return run, given


@dataclass
class Compiled:
    run: Any
    function: int = FUNCTION
    packed_metadata: tuple[str, ...] = METADATA


@dataclass
class Kernel:
    """Compiles to a given launcher, and notes through whom it was launched."""

    run: Any
    arg_names: tuple[str, ...] = ("x", "y", "n", "BLOCK", "EARLY")
    compiled: list[tuple[object, ...]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def first(*args: object, **constants: object) -> Compiled:
            self.compiled.append((grid, args, constants))
            return Compiled(self.run)

        return first


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM + device, raising=False
    )


@pytest.mark.parametrize("scratch", [0, 64])
@pytest.mark.parametrize("version", [f"{KNOWN_VERSIONS[0]}0", "99.0"])
def test_the_driver_gets_what_triton_would_give_it(
    scratch: int, version: str, cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when an argument is left out, moved, or a kernel's scratch is not made."""
    monkeypatch.setattr(triton, "__version__", version)
    allocation = triton.runtime._allocation
    token = allocation._allocator.set(lambda size, align, stream: ("scratch", size, align, stream))
    try:
        run, given = triton_launcher(scratch)
        run(*GRID, STREAM, FUNCTION, METADATA, None, None, None, *ARGS, 128, True)
        launch = Launcher(Kernel(run))
        launch(GRID, ARGS, CONSTANTS, "kind")  # compiles
        launch(GRID, ARGS, CONSTANTS, "kind")
    finally:
        allocation._allocator.reset(token)
    want, got = given
    assert got == want
    assert (want[7] is None) == (scratch == 0)


def test_kinds_and_constants_are_compiled_apart(cuda: None) -> None:
    """Red when a variant serves a launch of another kind or with another constant."""
    kernel = Kernel(triton_launcher(0)[0])
    launch = Launcher(kernel)
    for _ in range(2):
        for kind in ("a", "b"):
            for block in (64, 128):
                launch(GRID, ARGS, {**CONSTANTS, "BLOCK": block}, kind)
    assert len(kernel.compiled) == 4


@pytest.mark.parametrize("value", [1, 2, 3, 16, 17, 100, 4096, 4097])
def test_small_sums_are_triton_s(value: int) -> None:
    """Red when a grid or a padded width would differ from what kernels were written for."""
    assert pad_to_power(value) == triton.next_power_of_2(value)
    assert ceil_div(value, 16) == triton.cdiv(value, 16)
