"""Compiling ahead side by side, with doubles of Triton's kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

import quire.kernels.launch as launch
from quire.kernels.rehearsal import rehearsal

NUM_KERNELS = 12


class Compiled:
    """Its launcher comes through one place that all share, as Triton's come through one module."""

    packed_metadata = function = None
    shared: ClassVar[dict[str, str]] = {}

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def run(self) -> str:
        self.shared["launch"] = self.name
        time.sleep(0.002)  # others get their turn
        return self.shared["launch"]


class Kernel:
    arg_names = ("x",)

    def __init__(self, name: str) -> None:
        self.name, self.built = name, 0

    def warmup(self, *args: object, **options: object) -> Compiled:
        self.built += 1
        return Compiled(self.name)


class Launched(Kernel):
    def __getitem__(self, grid: object) -> Callable[..., Compiled]:
        return self.warmup


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(launch, "_build_entry", lambda compiled: compiled.run)
    monkeypatch.setattr(launch, "_entry", lambda run: (run, ()))
    yield


def test_every_kernel_keeps_its_own_launcher() -> None:
    """Red when launchers are loaded by several threads at a time."""
    kernels: list[Any] = [Kernel(f"kernel {i}") for i in range(NUM_KERNELS)]
    launchers = [launch.Launcher(kernel) for kernel in kernels]
    with rehearsal():
        for launcher in launchers:
            for _ in range(2):  # the second time it is on its way
                launcher((1, 1, 1), (0,), {}, "kind")
    for kernel, launcher in zip(kernels, launchers, strict=True):
        assert kernel.built == 1
        assert [variant.launch for variant in launcher._variants.values()] == [kernel.name]


def test_a_launcher_that_takes_part_waits_for_the_threads() -> None:
    """Red when its first launch loads a launcher while threads load theirs."""
    others: list[Any] = [Kernel(f"kernel {i}") for i in range(NUM_KERNELS)]
    own: Any = Launched("own")
    launcher = launch.Launcher(own, skips_rehearsals=False)
    with rehearsal():
        for kernel in others:
            launch.Launcher(kernel)((1, 1, 1), (0,), {}, "kind")
        launcher((1, 1, 1), (0,), {}, "kind")
    assert [variant.launch for variant in launcher._variants.values()] == ["own"]


def test_a_kernel_that_does_not_compile_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> Compiled:
        raise ValueError("too large a tile")

    broken, sound = Kernel("broken"), Kernel("sound")
    monkeypatch.setattr(broken, "warmup", fail)
    kernels: list[Any] = [broken, sound]
    launchers = [launch.Launcher(kernel) for kernel in kernels]
    with pytest.raises(ValueError, match="too large a tile"), rehearsal():
        for launcher in launchers:
            launcher((1, 1, 1), (0,), {}, "kind")
    assert [len(launcher._variants) for launcher in launchers] == [0, 1]  # nothing else is lost
