"""simulate: the real scheduler, page bookkeeping and router under a load, on measured times.

One loop over the clocks of all engines: whatever happens first is done first, so a router that
chooses at some time knows what was known then. A prediction is as good as the cost table and the
workload.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import NamedTuple

from quire.bench.serve.client import Outcome
from quire.bench.serve.work import Ask
from quire.errors import BadRequest
from quire.params import SamplingParams
from quire.request import Request
from quire.router.settings import Policy
from quire.sched.stats import SchedStats
from quire.sim.engine import Node, NodeRun, SimEngine
from quire.sim.front import Front, News
from quire.sim.senders import Senders
from quire.step import TokenEvent


@dataclass(frozen=True, slots=True)
class Fleet:
    """Equal engines behind a router."""

    engine: SimEngine
    replicas: int = 1
    policy: Policy = "prefix"


@dataclass(frozen=True, slots=True)
class Simulated:
    outcomes: list[Outcome]
    nodes: list[NodeRun]
    places: list[int]  # of each request: the number of the node that answered
    seconds: float

    @property
    def stats(self) -> SchedStats:
        """Of all nodes together."""
        several = [asdict(node.stats) for node in self.nodes]
        return SchedStats(**{name: sum(one[name] for one in several) for name in several[0]})

    @property
    def utilisation(self) -> float:
        """Of the devices, in the mean."""
        busy = sum(node.busy_s for node in self.nodes) / len(self.nodes)
        return busy / self.seconds if self.seconds else 0.0


def simulate(
    fleet: Fleet | SimEngine,
    asks: Sequence[Ask],
    clients: int | None = None,
    conversations: Sequence[int] = (),
) -> Simulated:
    """`clients`: so many send one request behind another; None: each is sent when it is meant.
    `conversations`: of each request; a client waits for the answer before."""
    if isinstance(fleet, SimEngine):
        fleet = Fleet(fleet)
    return _Run(fleet, asks, Senders(asks, clients, conversations)).all()


class _Answer(NamedTuple):
    events: list[TokenEvent]


class _Look(NamedTuple):
    node: int


class _Send(NamedTuple):
    request: int  # its number


_Happening = _Answer | News | _Look | _Send
_ORDER: tuple[type, ...] = (_Answer, News, _Look, _Send)  # at one time; steps begin after all


class _Run:
    def __init__(self, fleet: Fleet, asks: Sequence[Ask], senders: Senders) -> None:
        self.asks, self.senders, self.words = asks, senders, dict[str, int]()
        self.engine = fleet.engine
        self.nodes = [Node(fleet.engine) for _ in range(fleet.replicas)]
        self.front = Front(self.nodes, fleet.policy) if fleet.replicas > 1 else None
        self.outcomes = [Outcome(ask.at) for ask in asks]
        self.places = [0] * len(asks)
        self.num_open = len(asks)
        self._order = count()  # of what happens at one time
        self._heap: list[tuple[float, int, int, _Happening]] = []
        for sending in senders.first():
            self._push(sending.at, _Send(sending.request))
        if self.front is not None:
            for number in range(fleet.replicas):
                self._push(self.front.watch_s, _Look(number))

    def all(self) -> Simulated:
        while True:
            working = [node for node in self.nodes if node.has_work]
            if not working and not self.num_open:
                break
            node = min(working, key=lambda one: one.clock.now, default=None)
            if node is None or (self._heap and self._heap[0][0] <= node.clock.now):
                self._happen()
            else:
                events = node.step()
                if events:
                    self._push(node.clock.now, _Answer(events))
        seconds = max((outcome.ended for outcome in self.outcomes), default=0.0)
        return Simulated(self.outcomes, [n.run() for n in self.nodes], self.places, seconds)

    def _push(self, at: float, what: _Happening) -> None:
        order = what.request if isinstance(what, _Send) else next(self._order)
        heapq.heappush(self._heap, (at, _ORDER.index(type(what)), order, what))

    def _happen(self) -> None:
        at, _, _, what = heapq.heappop(self._heap)
        if isinstance(what, _Answer):
            self._answered(what.events, at)
        elif isinstance(what, _Send):
            self._send(what.request, at)
        elif self.front is None:
            raise AssertionError("nobody asks what one engine has cached")
        elif isinstance(what, _Look):
            if (news := self.front.look(what.node)) is not None:
                self._push(max(at, self.nodes[what.node].clock.now), news)
        else:
            self.front.hear(what, at)
            self._push(at + self.front.watch_s, _Look(what.node))

    def _answered(self, events: list[TokenEvent], at: float) -> None:
        for event in events:
            index = int(event.request_id)
            outcome = self.outcomes[index]
            if event.tokens:
                outcome.token_times.append(at)
                outcome.num_output += len(event.tokens)
            if self.front is not None:
                self.front.answered(index, at, event.finish is not None)
            if event.finish is not None:
                outcome.ended = at
                self.num_open -= 1
                for sending in self.senders.ended(index, at):
                    self._push(sending.at, _Send(sending.request))

    def _send(self, index: int, at: float) -> None:
        ask, outcome = self.asks[index], self.outcomes[index]
        prompt = self._ids(ask.prompt)
        self._check(index, len(prompt) + ask.num_output)
        outcome.meant = outcome.sent = at
        outcome.num_prompt = len(prompt)
        params = SamplingParams(temperature=0.0, max_tokens=ask.num_output, ignore_eos=True)
        if self.front is not None:
            self.places[index] = self.front.place(index, prompt, at)
        self.nodes[self.places[index]].send(Request.new(index, prompt, params, arrival=at), at)

    def _check(self, index: int, num_tokens: int) -> None:
        sched, kv = self.engine.sched, self.nodes[0].kv
        if num_tokens > sched.max_model_len:
            raise BadRequest(
                f"request {index} has {num_tokens} tokens with its answer, the engine takes"
                f" {sched.max_model_len}; shorten it, or measure costs with a larger"
                " --max-model-len"
            )
        if kv.pages_for(num_tokens) > self.engine.num_pages:
            raise BadRequest(
                f"request {index} needs {kv.pages_for(num_tokens)} pages, the engine has"
                f" {self.engine.num_pages}; shorten it, or give it more --num-pages"
            )

    def _ids(self, text: str) -> list[int]:
        """A token for each word, so that prompts share what their words share."""
        return [self.words.setdefault(word, 2 + len(self.words)) for word in text.split(" ")]
