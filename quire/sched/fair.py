"""The fair line: each key has a line of its own, and the key that was served least is next.

Service is counted in tokens over the key's weight: what is computed of the prompt when a request
starts, the answer when it ends. This is deficit round robin with a quantum of one token, without
walking the rounds: the key whose deficit would be paid first is taken at once. A key that comes
back is lifted to the clock of the others: idling earns no credit, leaving forgives no debt.

Inside a key the order is by arrival. A key with nothing running does not wait for another key's
second request to end: that one makes room, and the room is kept for the key it was made for, not
for whoever was served less, the one that left perhaps. Whoever is preempted, for room or for pages,
comes from the key that runs most, the last to start first; so the first to start always gets on.
`queue.py` has the other lines.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping

from quire.request import Request, RequestId
from quire.sched.queue import BEHIND_ALL, Place, WaitingLine, take_out

BACKGROUND = "\0background"  # a line of its own, behind all; no key is called so


class FairLine(WaitingLine):
    def __init__(self) -> None:
        super().__init__(lambda r: r.turn + (BEHIND_ALL if r.is_background else 0.0))
        self._lines: dict[str, list[Place]] = {}  # sorted, none empty
        self._served: dict[str, float] = {}  # tokens over weight, by key
        self._clock = 0.0  # service of the key that was next last time
        self._promised: str | None = None  # the line that somebody made room for

    def __iter__(self) -> Iterator[Request]:
        """In order of service, as if every request cost its prompt and nothing else."""
        lines = {name: line[::-1] for name, line in self._lines.items()}
        heads = [(*self._place(name, line[-1][2]), name) for name, line in lines.items()]
        heapq.heapify(heads)
        while heads:
            _, is_last, served, _, _, name = heads[0]
            request = lines[name].pop()[2]
            yield request
            if line := lines[name]:
                head = line[-1][2]
                served += _price(request)
                place = (True, is_last, served, head.timing.arrival, head.id)
                heapq.heapreplace(heads, (*place, name))
            else:
                heapq.heappop(heads)

    def push(self, request: Request) -> None:
        self._note(request)
        name = _line_name(request)
        if name not in self._lines:
            self._lines[name] = []
            self._served[name] = max(self._served.get(name, 0.0), self._clock)
        insort(self._lines[name], (request.timing.arrival, request.id, request))

    def peek(self) -> Request:
        lines = self._lines
        name = min(lines, key=lambda name: self._place(name, lines[name][0][2]))
        return lines[name][0][2]

    def _place(self, name: str, head: Request) -> tuple[bool, bool, float, float, int]:
        """Of a line among the others: the promised one first, background last, then by service,
        then by arrival."""
        is_unpromised = name != self._promised
        return is_unpromised, head.is_background, self._served[name], head.timing.arrival, head.id

    def pop(self, num_cached: int = 0) -> Request:
        request = self.peek()
        name = _line_name(request)
        self._clock = max(self._clock, self._served[name])
        if request.timing.scheduled is None:
            request.turn = self._clock
        self._served[name] += _price(request, num_cached)
        del self._lines[name][0]
        self._promised = None
        self._drop_if_empty(name)
        self._forget(request)
        return request

    def remove(self, request: Request) -> None:
        name = _line_name(request)
        take_out(self._lines[name], (request.timing.arrival, request.id, request))
        self._drop_if_empty(name)
        self._forget(request)

    def _drop_if_empty(self, name: str) -> None:
        if not self._lines[name]:
            del self._lines[name]
            if name == self._promised:
                self._promised = None

    def ended(self, request: Request) -> None:
        if request.timing.scheduled is not None:
            self._served[_line_name(request)] += request.num_output / request.weight

    def victim(self, running: Mapping[RequestId, Request]) -> Request:
        """Of the background first; then of a key that has several; then the last to start."""
        last = super().victim(running)
        return last if last.is_background else _of_the_richest(running) or last

    def is_owed(self, running: Mapping[RequestId, Request]) -> bool:
        """Whether the next key has nothing running, while others have."""
        if not self._lines or not running:
            return False
        first = self.peek()
        return not first.is_background and all(
            other.tenant != first.tenant for other in running.values()
        )

    def displaced(self, running: Mapping[RequestId, Request]) -> Request | None:
        owing = _of_the_richest(running) if self.is_owed(running) else None
        if owing is not None:
            self._promised = _line_name(self.peek())
        return owing


def _line_name(request: Request) -> str:
    return BACKGROUND if request.is_background else request.tenant


def _of_the_richest(running: Mapping[RequestId, Request]) -> Request | None:
    """The last to start of the key that runs most for its weight; nobody's only one."""
    counts = Counter(request.tenant for request in running.values())
    rich = [request for request in running.values() if counts[request.tenant] > 1]
    return max(rich, key=lambda r: (counts[r.tenant] / r.weight, r.turn, r.id), default=None)


def _price(request: Request, num_cached: int = 0) -> float:
    """What starting costs the key; a request that was preempted has paid."""
    has_paid = request.timing.scheduled is not None
    return 0.0 if has_paid else (len(request.tokens) - num_cached) / request.weight
