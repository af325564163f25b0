"""JointLoop: one engine, stepped by whichever thread waits for it.

A call brings its conversations and waits until they are done. The first thread to wait steps for
everybody; the others sleep until it has news for them, and one of them steps on when it leaves. So
the requests of all threads share each batch. Whoever touches the core holds the turn. A thread
that only wants to add or look goes before the next step.

A step that raises costs the request that caused it (`guard.py`). What the guard cannot contain,
and Ctrl-C inside a step, ends every request with an error and is raised in the thread that stepped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from quire.engine.core import EngineCore
from quire.engine.guard import MESSAGE, Guard
from quire.engine.output import Conversation
from quire.outputs import StreamEvent
from quire.request import RequestId
from quire.step import TokenEvent


class Batch:
    """The conversations of one call. `num_news` grows when one of them ends or shows a piece."""

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        self.conversations = conversations
        self.num_open = len(conversations)
        self.num_news = 0


class JointLoop:
    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._guard = Guard(core, _describe)
        self._live: dict[RequestId, tuple[Conversation, Batch]] = {}
        self._left: deque[RequestId] = deque()  # dropped by their callers, not yet aborted
        # Guards the turn alone. Reentrant: the garbage collector may close a stream anywhere.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._owner: int | None = None  # the thread that has the turn
        self._num_asking = 0

    # ------------------------------------------------------------ calls

    def run(self, conversations: Sequence[Conversation], advance: Callable[[], None]) -> None:
        """Until all have ended; `advance` is called once for each, in this thread."""
        batch = Batch(conversations)
        try:
            self._add(batch)
            num_seen = 0
            while num_seen < len(conversations):
                self._step_past(batch, num_seen)
                while num_seen < batch.num_news:
                    num_seen += 1
                    advance()
        finally:  # Ctrl-C included: leave no request behind
            self._drop(batch)

    def stream(self, conversation: Conversation) -> Iterator[StreamEvent]:
        """Pieces as they come. Closing the iterator aborts the request."""
        inbox: deque[StreamEvent] = deque()
        conversation.inbox = inbox
        batch = Batch([conversation])
        try:
            self._add(batch)
            while True:
                # Looked at before the inbox: another thread may be filling it.
                is_over, num_news = not batch.num_open, batch.num_news
                while inbox:
                    yield inbox.popleft()
                if is_over:
                    return
                self._step_past(batch, num_news)
        finally:
            self._drop(batch)

    @contextmanager
    def turn(self) -> Iterator[EngineCore]:
        """The core, with no step under way: for whoever looks at it or changes it."""
        if self._owner == threading.get_ident():  # a signal handler, in the middle of a step
            yield self._core
            return
        try:
            with self._lock:
                self._num_asking += 1
                try:
                    while self._owner is not None:
                        self._changed.wait()
                    self._owner = threading.get_ident()
                finally:
                    self._num_asking -= 1
            yield self._core
        finally:
            self._end_turn(has_news=True)

    # ------------------------------------------------------------ turns

    def _step_past(self, batch: Batch, num_news: int) -> None:
        """Step, or wait for the thread that does, until the batch has more news than that."""
        while batch.num_news == num_news:
            has_news = True  # whatever goes wrong, the others have to look again
            try:
                has_turn = self._take_turn(batch, num_news)
                has_news = has_turn and self._step()
            finally:
                self._end_turn(has_news)

    def _take_turn(self, batch: Batch, num_news: int) -> bool:
        """False when the news came while another thread had the turn."""
        with self._lock:
            while batch.num_news == num_news:
                if self._owner is None and not self._num_asking:
                    self._owner = threading.get_ident()
                    return True
                self._changed.wait()
        return False

    def _end_turn(self, has_news: bool) -> None:
        with self._lock:
            if self._owner == threading.get_ident():
                try:
                    self._abort_left()
                finally:
                    self._owner = None
            # Without news nobody is woken: the thread that stepped takes the next turn as well.
            if has_news or self._num_asking:
                self._changed.notify_all()

    # ------------------------------------------------------------ inside a turn

    def _add(self, batch: Batch) -> None:
        with self.turn() as core:
            for conversation in batch.conversations:
                self._live.update(dict.fromkeys(conversation.answers, (conversation, batch)))
                core.add(conversation.leader)

    def _drop(self, batch: Batch) -> None:
        """Never waits: where a thread has the turn, it aborts the requests at the end of it."""
        if not batch.num_open:
            return
        for conversation in batch.conversations:
            self._left.extend(conversation.answers)
        with self._lock:
            if self._owner is None:
                self._owner = threading.get_ident()
                self._end_turn(has_news=True)

    def _abort_left(self) -> None:
        while self._left:
            request_id = self._left.popleft()
            if self._live.pop(request_id, None) is not None:
                self._core.abort(request_id)

    def _step(self) -> bool:
        """One step for everybody; each event goes to its conversation. True if anyone has news."""
        has_news = False
        try:
            for event in self._guard.step():
                has_news |= self._hand_out(event)
        except BaseException as error:
            self._fail_all(error)
            raise
        return has_news

    def _hand_out(self, event: TokenEvent) -> bool:
        conversation, batch = self._live.get(event.request_id, (None, None))
        if conversation is None or batch is None:
            return False  # dropped while this step was in flight
        is_stopped = conversation.take(event)
        if is_stopped:
            self._core.abort(event.request_id, "stop")
        if is_stopped or event.finish is not None:
            del self._live[event.request_id]
            if conversation.finished:
                batch.num_open -= 1
                batch.num_news += 1
                return True
        if conversation.inbox:
            batch.num_news += 1
            return True
        return False

    def _fail_all(self, error: BaseException) -> None:
        """A step was lost, and with it part of every running request's state: end them all."""
        self._core.abandon()
        request_ids = list(self._live)
        reason = f"the engine failed: {type(error).__name__}: {error}"
        for request_id in request_ids:  # first, so that no thread waits for what cannot come
            self._hand_out(TokenEvent(request_id, (), finish="error", error=reason))
        for request_id in request_ids:
            self._core.abort(request_id, "error")


def _describe(error: Exception) -> str:
    return f"{MESSAGE}: {type(error).__name__}: {error}"
