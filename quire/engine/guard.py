"""Guard: a step that raises costs the request that caused it, not everyone in the batch.

Nobody can tell from an exception whose fault it was. So all requests go back to the line, as after
a preemption (they lose no token), and come in again one at a time: a request that takes part in a
step that succeeds is cleared, and if a step fails again the newcomer did it and ends alone with an
error. Want of memory is nobody's fault the first time: the batch comes in again smaller. What
breaks the device or our own bookkeeping is not contained: the process must start anew.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

from quire.engine.core import EngineCore
from quire.errors import EngineDead
from quire.obs.log import log_event
from quire.request import Request, RequestId
from quire.step import TokenEvent

MAX_FAILURES = 64  # in a row, without one good step between: this is not about one request
BOOKKEEPING = ("quire.sched.", "quire.kv.")  # a step's plan or its result is half entered
MESSAGE = "the engine failed on this request; others were not affected"


class Guard:
    def __init__(
        self, core: EngineCore, describe: Callable[[Exception], str] = lambda error: MESSAGE
    ) -> None:
        """`describe` makes what the failed request is told; clients of a server learn no more."""
        self.core, self.scheduler, self._describe = core, core.scheduler, describe
        self.num_faults = 0
        self._lag = core.lag
        self._suspects: set[RequestId] = set()
        self._failures_in_row = 0

    def step(self) -> list[TokenEvent]:
        """`EngineCore.step`, but what one request raises ends only that request."""
        try:
            events = self.core.step()
        except Exception as error:
            self._failures_in_row += 1
            if is_fatal(error) or self._failures_in_row > MAX_FAILURES:
                raise
            self.num_faults += 1
            log_event("step_failed", severity=logging.ERROR, traceback=traceback.format_exc())
            return self._contain(error)
        self._failures_in_row = 0
        if self._suspects:
            self._clear()
        return events

    def _contain(self, error: Exception) -> list[TokenEvent]:
        """After a failed step: end the culprit if there is only one it can be, requeue the rest."""
        self.core.abandon()
        running = list(self.scheduler.running.values())
        culprit = self._culprit(running)
        if is_out_of_memory(error) and self._failures_in_row == 1:
            culprit = None
        events: list[TokenEvent] = []
        if culprit is not None:
            self._suspects.discard(culprit.id)
            told = self._describe(error)
            events = [e._replace(error=told) for e in self.core.abort(culprit.id, "error")]
        self._suspects.update(self.scheduler.requeue_running())
        self._set_pace(1)
        return events

    def _culprit(self, running: list[Request]) -> Request | None:
        if len(running) == 1:
            return running[0]
        if self._suspects and running:  # one newcomer at a time: the last to have come in
            return running[-1]
        return None

    def _clear(self) -> None:
        """A good step: whoever drew a token in it is cleared, and there is room for one more."""
        scheduler = self.scheduler
        cleared = {work.request_id for work in self.core.last_plan.works if work.sample}
        self._suspects -= cleared
        self._suspects &= {*scheduler.running, *(request.id for request in scheduler.waiting)}
        if not self._suspects.intersection(scheduler.running):
            self._set_pace(len(scheduler.running) + 1)

    def _set_pace(self, max_running: int) -> None:
        """While there are suspects: few at a time, and no step ahead of the last one's result."""
        most = self.scheduler.config.max_num_seqs
        self.scheduler.max_running = min(max_running, most) if self._suspects else most
        self.core.lag = 0 if self._suspects else self._lag


def is_fatal(error: Exception) -> bool:
    """Broken device, or broken bookkeeping: nothing in this process can be trusted any more."""
    if isinstance(error, (AssertionError, EngineDead)):
        return True
    if type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error):
        return True
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals["__name__"].startswith(BOOKKEEPING) for frame, _ in frames)


def is_out_of_memory(error: Exception) -> bool:
    """torch.OutOfMemoryError, or Python's own; by name, so that nothing here needs torch."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
