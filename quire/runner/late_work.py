"""LateWork: what steps had to compile and capture after the engine was ready.

Either makes the requests of its step wait, for a second or for some hundredths of one. On a CPU
there is neither.
"""

from __future__ import annotations

from quire.obs.log import log_event
from quire.runner.drafter import ModelDrafter
from quire.runner.graphs import GraphMemory
from quire.runner.runner import ModelRunner


class LateWork:
    def __init__(self, runner: ModelRunner) -> None:
        """Counts from now on."""
        self.num_compiled = 0
        self._memories = _memories(runner)
        self._num_captured_before = self._num_captured
        if runner.model.device.type == "cuda":
            from quire.kernels.compiles import tell_compiles

            tell_compiles(self.compiled)

    def as_dict(self) -> dict[str, float]:
        num_captured = self._num_captured - self._num_captured_before
        return {"num_late_compiles": self.num_compiled, "num_late_captures": num_captured}

    @property
    def seen(self) -> tuple[int, int]:
        """(compiled, captured) so far."""
        return self.num_compiled, self._num_captured

    def pardon(self, since: tuple[int, int]) -> None:
        """Nobody waited for what was done since `seen` was this."""
        self.num_compiled = since[0]
        self._num_captured_before += self._num_captured - since[1]

    @property
    def _num_captured(self) -> int:
        return sum(memory.num_captured for memory in self._memories)

    def compiled(self, kernel: str) -> None:
        self.num_compiled += 1
        log_event("kernel_compiled", kernel=kernel)


def _memories(runner: ModelRunner) -> list[GraphMemory]:
    drafter = runner.drafter
    runners = [runner, drafter.runner] if isinstance(drafter, ModelDrafter) else [runner]
    return [one.graphs.memory for one in runners if one.graphs is not None]
