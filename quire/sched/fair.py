"""The fair line: each key has a line of its own, and the key that was served least is next.

Service is counted in tokens over the key's weight: what is computed of the prompt when a request
starts, the answer when it ends. This is deficit round robin with a quantum of one token, without
walking the rounds: the key whose deficit would be paid first is taken at once. A key that comes
back is lifted to the clock of the others: idling earns no credit, leaving forgives no debt.

Inside a key the order is by arrival. A key with nothing running does not wait for another key's
second request to end: that one makes room. Whoever is preempted, for room or for pages, comes from
the key that runs most, the last to start first; so the first to start always gets on. `queue.py`
has the other lines.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping

from quire.request import Request, RequestId
from quire.sched.queue import WaitingLine


class FairLine(WaitingLine):
    def __init__(self) -> None:
        super().__init__(key=lambda request: request.turn)
        self._lines: dict[str, list[tuple[float, int, Request]]] = {}  # heaps, none empty
        self._served: dict[str, float] = {}  # tokens over weight, by key
        self._clock = 0.0  # service of the key that was next last time

    def __iter__(self) -> Iterator[Request]:
        """In order of service, as if every request cost its prompt and nothing else."""
        lines = {tenant: sorted(line, reverse=True) for tenant, line in self._lines.items()}
        heads = [(self._served[tenant], *line[-1][:2], tenant) for tenant, line in lines.items()]
        heapq.heapify(heads)
        while heads:
            served, _, _, tenant = heads[0]
            request = lines[tenant].pop()[2]
            yield request
            if line := lines[tenant]:
                heapq.heapreplace(heads, (served + _price(request), *line[-1][:2], tenant))
            else:
                heapq.heappop(heads)

    def push(self, request: Request) -> None:
        self._note(request)
        tenant = request.tenant
        if tenant not in self._lines:
            self._lines[tenant] = []
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._clock)
        heapq.heappush(self._lines[tenant], (request.timing.arrival, request.id, request))

    def peek(self) -> Request:
        lines, served = self._lines, self._served
        tenant = min(lines, key=lambda t: (served[t], *lines[t][0][:2]))
        return lines[tenant][0][2]

    def pop(self, num_cached: int = 0) -> Request:
        request = self.peek()
        tenant = request.tenant
        self._clock = max(self._clock, self._served[tenant])
        if request.timing.scheduled is None:
            request.turn = self._clock
        self._served[tenant] += _price(request, num_cached)
        heapq.heappop(self._lines[tenant])
        self._drop_if_empty(tenant)
        self._forget(request)
        return request

    def remove(self, request: Request) -> None:
        line = self._lines[request.tenant]
        line[:] = [item for item in line if item[2] is not request]
        heapq.heapify(line)
        self._drop_if_empty(request.tenant)
        self._forget(request)

    def _drop_if_empty(self, tenant: str) -> None:
        if not self._lines[tenant]:
            del self._lines[tenant]

    def ended(self, request: Request) -> None:
        if request.timing.scheduled is not None:
            self._served[request.tenant] += request.num_output / request.weight

    def victim(self, running: Mapping[RequestId, Request]) -> Request:
        """As in `displaced`; where nobody has two, the last to start. The first never is."""
        return self.displaced(running) or super().victim(running)

    def is_owed(self, running: Mapping[RequestId, Request]) -> bool:
        """Whether the next key has nothing running, while others have."""
        if not self._lines:
            return False
        tenant = self.peek().tenant
        return bool(running) and all(other.tenant != tenant for other in running.values())

    def displaced(self, running: Mapping[RequestId, Request]) -> Request | None:
        """The last to start of the key that runs most for its weight; nobody's only one."""
        counts = Counter(request.tenant for request in running.values())
        rich = [request for request in running.values() if counts[request.tenant] > 1]
        if not rich:
            return None
        return max(rich, key=lambda r: (counts[r.tenant] / r.weight, r.turn, r.id))


def _price(request: Request, num_cached: int = 0) -> float:
    """What starting costs the key; a request that was preempted has paid."""
    has_paid = request.timing.scheduled is not None
    return 0.0 if has_paid else (len(request.tokens) - num_cached) / request.weight
