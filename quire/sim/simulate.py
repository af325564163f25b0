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

HANDED_OVER = "simulated"  # a ticket


@dataclass(frozen=True, slots=True)
class Fleet:
    """Equal engines behind a router. With `prefill` others of the same kind compute the prompts,
    and hand the pages over to those that decode."""

    engine: SimEngine
    replicas: int = 1
    policy: Policy = "prefix"
    prefill: int = 0

    @property
    def num_devices(self) -> int:
        facts = self.engine.costs.engine
        return (self.replicas + self.prefill) * facts.ranks * facts.stages


@dataclass(frozen=True, slots=True)
class Simulated:
    outcomes: list[Outcome]
    nodes: list[NodeRun]
    places: list[int]  # of each request: the number of the node that answered
    seconds: float
    prefill: list[NodeRun]

    @property
    def stats(self) -> SchedStats:
        """Of all nodes together."""
        several = [asdict(node.stats) for node in self.nodes]
        return SchedStats(**{name: sum(one[name] for one in several) for name in several[0]})

    @property
    def utilisation(self) -> float:
        """Of the devices, in the mean."""
        every = [*self.nodes, *self.prefill]
        busy = sum(node.busy_s for node in every) / len(every)
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
    crew: _Crew
    node: int


class _Heard(NamedTuple):
    crew: _Crew
    news: News


class _Send(NamedTuple):
    request: int  # its number


_Happening = _Answer | _Heard | _Look | _Send
_ORDER: tuple[type, ...] = (_Answer, _Heard, _Look, _Send)  # at one time; steps begin after all


class _Crew:
    """Nodes of one kind, with a router in front where there are several."""

    def __init__(self, engine: SimEngine, count: int, policy: Policy) -> None:
        self.nodes = [Node(engine) for _ in range(count)]
        self.front = Front(self.nodes, policy) if count > 1 else None

    def send(self, request: Request, index: int, at: float) -> int:
        """The number of the node that has it now."""
        number = 0
        if self.front is not None:
            number = self.front.place(index, request.tokens, at)
        self.nodes[number].send(request, at)
        return number

    def answered(self, index: int, at: float, is_over: bool, is_stream: bool = True) -> None:
        if self.front is not None:
            self.front.answered(index, at, is_over, is_stream)


class _Run:
    def __init__(self, fleet: Fleet, asks: Sequence[Ask], senders: Senders) -> None:
        self.asks, self.senders, self.words = asks, senders, dict[str, int]()
        self.engine = fleet.engine
        self.crew = _Crew(fleet.engine, fleet.replicas, fleet.policy)
        self.helpers = _Crew(fleet.engine, fleet.prefill, fleet.policy)
        self.nodes = [*self.crew.nodes, *self.helpers.nodes]
        self.outcomes = [Outcome(ask.at) for ask in asks]
        self.places = [0] * len(asks)
        self.num_open = len(asks)
        self._order = count()  # of what happens at one time
        self._heap: list[tuple[float, int, int, _Happening]] = []
        for sending in senders.first():
            self._push(sending.at, _Send(sending.request))
        for crew in (self.crew, self.helpers):
            if crew.front is not None:
                for number in range(len(crew.nodes)):
                    self._push(crew.front.watch_s, _Look(crew, number))

    def all(self) -> Simulated:
        while True:
            working = [node for node in self.nodes if node.has_work]
            if not working and not self.num_open:
                break
            node = min(working, key=lambda one: one.ready_at, default=None)
            if node is None or (self._heap and self._heap[0][0] <= node.ready_at):
                self._happen()
            else:
                events = node.step()
                if events:
                    self._push(node.clock.now, _Answer(events))
        seconds = max((outcome.ended for outcome in self.outcomes), default=0.0)
        runs, helpers = ([node.run() for node in c.nodes] for c in (self.crew, self.helpers))
        return Simulated(self.outcomes, runs, self.places, seconds, helpers)

    def _push(self, at: float, what: _Happening) -> None:
        order = what.request if isinstance(what, _Send) else next(self._order)
        heapq.heappush(self._heap, (at, _ORDER.index(type(what)), order, what))

    def _happen(self) -> None:
        at, _, _, what = heapq.heappop(self._heap)
        if isinstance(what, _Answer):
            self._answered(what.events, at)
        elif isinstance(what, _Send):
            self._send(what.request, at)
        elif isinstance(what, _Look):
            self._look(what, at)
        else:
            assert what.crew.front is not None
            what.crew.front.hear(what.news, at)
            self._push(at + what.crew.front.watch_s, _Look(what.crew, what.news.node))

    def _look(self, look: _Look, at: float) -> None:
        assert look.crew.front is not None
        news = look.crew.front.look(look.node)
        if news is not None:
            said_at = max(at, look.crew.nodes[look.node].clock.now)
            self._push(said_at, _Heard(look.crew, news))

    def _answered(self, events: list[TokenEvent], at: float) -> None:
        for event in events:
            index = int(event.request_id)
            if index >= len(self.asks):
                self._computed(index - len(self.asks), at)
                continue
            outcome, is_over = self.outcomes[index], event.finish is not None
            if event.tokens:
                outcome.token_times.append(at)
                outcome.num_output += len(event.tokens)
            self.crew.answered(index, at, is_over)
            if is_over:
                outcome.ended = at
                self.num_open -= 1
                for sending in self.senders.ended(index, at):
                    self._push(sending.at, _Send(sending.request))

    def _send(self, index: int, at: float) -> None:
        outcome, prompt = self.outcomes[index], self._ids(self.asks[index].prompt)
        self._check(index, len(prompt) + self.asks[index].num_output)
        outcome.meant = outcome.sent = at
        outcome.num_prompt = len(prompt)
        if self.helpers.nodes:
            # A number of its own: the engine that decodes knows the request by its index.
            request = self._request(index + len(self.asks), prompt, 1, at)
            self.helpers.send(request, index, at)
        else:
            self._decode(index, prompt, at, "")

    def _computed(self, index: int, at: float) -> None:
        """The prompt of a request, by an engine for those that decode."""
        self.helpers.answered(index, at, is_over=True, is_stream=False)
        self._decode(index, self._ids(self.asks[index].prompt), at, HANDED_OVER)

    def _decode(self, index: int, prompt: list[int], at: float, source: str) -> None:
        request = self._request(index, prompt, self.asks[index].num_output, at)
        request.kv_source = source
        self.places[index] = self.crew.send(request, index, at)

    def _request(self, number: int, prompt: list[int], num_output: int, at: float) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        return Request.new(number, prompt, params, arrival=at)

    def _check(self, index: int, num_tokens: int) -> None:
        sched, kv = self.engine.sched, self.crew.nodes[0].kv
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
