"""LateWork: what steps had to compile and capture after the engine was ready.

Either makes the requests of its step wait, for a second or for some hundredths of one. On a CPU
there is neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quire.obs.log import log_event
from quire.runner.drafter import ModelDrafter
from quire.runner.graphs import GraphMemory
from quire.runner.runner import ModelRunner


class LateWork:
    def __init__(self, runner: ModelRunner) -> None:
        """Counts from now on."""
        self.num_compiled = self.num_captured = 0
        self._is_awaited = True
        for memory in _memories(runner):
            memory.tell = self.captured
        if runner.model.device.type == "cuda":
            from quire.kernels.compiles import tell_compiles

            tell_compiles(self.compiled)

    def as_dict(self) -> dict[str, float]:
        return {"num_late_compiles": self.num_compiled, "num_late_captures": self.num_captured}

    @contextmanager
    def awaited_by_nobody(self) -> Iterator[None]:
        """What is done within is not late."""
        self._is_awaited = False
        try:
            yield
        finally:
            self._is_awaited = True

    def compiled(self, kernel: str) -> None:
        self.num_compiled += self._is_awaited
        if self._is_awaited:
            log_event("late_compile", kernel=kernel)

    def captured(self, key: object) -> None:
        self.num_captured += self._is_awaited
        if self._is_awaited:
            log_event("late_capture", graph=str(key))


def _memories(runner: ModelRunner) -> list[GraphMemory]:
    drafter = runner.drafter
    runners = [runner, drafter.runner] if isinstance(drafter, ModelDrafter) else [runner]
    return [one.graphs.memory.alone for one in runners if one.graphs is not None]
