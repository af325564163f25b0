"""IdleWork: what the engine does while it has no requests, a piece at a time.

It checks the bookkeeping of pages, and it captures graphs that steps will need. Whoever comes
meanwhile waits for the piece at hand: some hundredths of a second, or longer where a kernel is
compiled for the first time on this machine.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from quire.kv.check import check_in_slices
from quire.obs.log import log_event

if TYPE_CHECKING:
    from quire.kv.manager import KVManager
    from quire.runner.ahead import Ahead
    from quire.runner.late_work import LateWork

CHECK_EVERY_S = 10.0  # checks walk every page: not after each short request
CHECK_LATEST_S = 60.0  # a check this late does not stop when a command arrives
QUIET_S = 0.005  # between two steps ahead: clients that answer at once are still on their way


class IdleWork:
    def __init__(
        self, kv: KVManager, woken: threading.Event, ahead: Ahead | None, late: LateWork | None
    ) -> None:
        """`woken` is set when somebody has come."""
        self._kv, self._woken, self._ahead, self._late = kv, woken, ahead, late
        self.next_check = 0.0

    @property
    def is_pending(self) -> bool:
        return self._ahead is not None

    def run(self) -> None:
        """A piece of it; ends early when somebody comes."""
        if time.monotonic() >= self.next_check:
            self.check_pages()
        if self._ahead is None or self._woken.wait(QUIET_S):
            return
        with nullcontext() if self._late is None else self._late.awaited_by_nobody():
            is_more = self._step_ahead(self._ahead)
        if not is_more:
            self._ahead = None
            log_event("ahead_done")

    def _step_ahead(self, ahead: Ahead) -> bool:
        try:
            return ahead.step()
        except RuntimeError as error:  # no memory, say: whoever needs such a step will be told
            log_event("ahead_failed", severity=logging.WARNING, error=" ".join(str(error).split()))
            return False

    def check_pages(self) -> None:
        """Check the page bookkeeping; stop when a command arrives and begin again when idle.

        A check that is overdue does not stop, so a request may wait a fraction of a second."""
        is_overdue = time.monotonic() > self.next_check + CHECK_LATEST_S
        for _ in check_in_slices(self._kv):
            if self._woken.is_set() and not is_overdue:
                return
        self.next_check = time.monotonic() + CHECK_EVERY_S
