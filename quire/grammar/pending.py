"""GrammarQueue: requests whose grammar is being compiled, kept out of the scheduler meanwhile.

Compiling runs on a thread of its own, so steps go on; the compiler lets other threads run. A
grammar that fails ends its own request with an error event and touches nobody else. All methods
are for the engine's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import PriorityQueue, SimpleQueue
from typing import NamedTuple

from quire.errors import QuireError
from quire.grammar.live import LiveMatchers
from quire.grammar.matcher import GrammarCompiler, Matcher
from quire.params import StructuredOutputsParams
from quire.request import Request, RequestId
from quire.step import TokenEvent

UNEXPECTED = "the grammar compiler failed"


class Job(NamedTuple):
    """One prompt's wish: a matcher for each of its answers. In order of service."""

    is_background: bool  # a line of a batch, behind everyone that somebody waits for
    ticket: int
    params: StructuredOutputsParams
    num_answers: int


class Done(NamedTuple):
    ticket: int
    matchers: list[Matcher]
    error: str | None


class GrammarQueue:
    def __init__(self, compiler: GrammarCompiler, matchers: LiveMatchers) -> None:
        self.compiler, self.matchers = compiler, matchers
        self._held: dict[int, Request] = {}  # by ticket, in order of arrival
        self._num_tickets = 0
        self._jobs: PriorityQueue[Job] = PriorityQueue()
        self._done: SimpleQueue[Done] = SimpleQueue()
        self._news = threading.Event()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._held)

    def waiting(self) -> Iterator[Request]:
        return iter(self._held.values())

    def submit(self, request: Request) -> None:
        """Hold a request, its siblings (n > 1) included, until their matchers are made."""
        params = request.params.structured_outputs
        assert params is not None
        self._num_tickets += 1
        self._held[self._num_tickets] = request
        count = 1 + len(request.children)
        self._jobs.put(Job(request.is_background, self._num_tickets, params, count))
        self._keep_working()

    def collect(self, add: Callable[[Request], None]) -> list[TokenEvent]:
        """Pass on what is ready; returns the last events of requests that failed."""
        self._news.clear()
        events: list[TokenEvent] = []
        while not self._done.empty():
            done = self._done.get()
            request = self._held.pop(done.ticket, None)
            if request is None:
                continue  # aborted meanwhile
            family = [request, *request.children]
            if done.error is None:
                # Aborted siblings leave more matchers than there are requests.
                for member, matcher in zip(family, done.matchers, strict=False):
                    self.matchers.add(member.id, matcher)
                add(request)
            else:
                events += [
                    TokenEvent(member.id, (), finish="error", error=done.error) for member in family
                ]
        self._keep_working()
        return events

    def wait(self, seconds: float) -> None:
        """Until something is ready, or this long."""
        self._news.wait(seconds)

    def abort(self, request_id: RequestId, reason: str) -> list[TokenEvent]:
        """End a held request; its siblings stay. No event for ids that are not here."""
        for ticket, request in self._held.items():
            family = [request, *request.children]
            rest = [member for member in family if member.id != request_id]
            if len(rest) == len(family):
                continue
            request.children = []
            if rest:
                rest[0].children = rest[1:]
                self._held[ticket] = rest[0]
            else:
                del self._held[ticket]
            return [TokenEvent(request_id, (), finish=reason)]
        return []

    def drop(self, request_id: RequestId) -> None:
        """The request has ended: its matcher goes."""
        self.matchers.drop(request_id)

    def _keep_working(self) -> None:
        """Start the thread at the first grammar, and again should a bug have ended it."""
        if self._held and (self._thread is None or not self._thread.is_alive()):
            # A daemon: a compilation that is still running must not keep the process alive.
            self._thread = threading.Thread(target=self._work, name="grammar", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            done = Done(job.ticket, [], UNEXPECTED)
            try:
                done = self._compile(job)
            finally:  # whatever happened, the request must end
                self._done.put(done)
                self._news.set()

    def _compile(self, job: Job) -> Done:
        try:
            made = [self.compiler.compile(job.params) for _ in range(job.num_answers)]
        except QuireError as error:
            return Done(job.ticket, [], str(error))
        return Done(job.ticket, made, None)
