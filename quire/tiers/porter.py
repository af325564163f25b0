"""Porter: a thread that does one thing after another, for whoever must not wait.

A task that raises ends its thread, which says so on stderr; another one goes on with the rest.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Task = Callable[[], None]


class Porter:
    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()
        self._is_busy = self._is_closed = False
        self._thread: threading.Thread | None = None

    def do(self, task: Task) -> None:
        """Do this when everything before is done. A closed porter does nothing any more."""
        with self._changed:
            if self._is_closed:
                return
            self._tasks.append(task)
            if self._thread is None:
                self._begin()
            self._changed.notify_all()

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Until nothing is left to do; False: that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks and not self._is_busy, seconds)

    def close(self, seconds: float) -> None:
        """Finish, for so long at most; what is left then is dropped."""
        self.wait(seconds)
        with self._changed:
            self._is_closed = True
            self._tasks.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        is_whole = False
        try:
            while self._do_next():
                pass
            is_whole = True
        finally:
            if not is_whole:
                with self._changed:
                    self._begin()

    def _do_next(self) -> bool:
        """False: closed."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._tasks) or self._is_closed)
            if self._is_closed:
                return False
            task, self._is_busy = self._tasks.popleft(), True
        task()
        return True  # and nothing holds what the task held
