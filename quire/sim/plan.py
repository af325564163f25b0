"""Plan: which devices, in which layout and how many replicas, serve a load best.

Every option that the devices' memory holds is simulated at every rate. A rate counts where a share
of its requests, `attain`, keeps the promise; what is within the promise then is the option's
goodput. More replicas are not tried where fewer keep the promise for everybody at the highest rate:
there is nothing left to gain, and each costs more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.bench.serve.figures import Promise, spread, timings
from quire.bench.serve.work import Ask
from quire.errors import NotSupported, OutOfMemory
from quire.router.settings import Policy
from quire.sim.devices import Device
from quire.sim.engine import SimEngine
from quire.sim.estimate import Layout
from quire.sim.outside import Link, Places
from quire.sim.simulate import Fleet, simulate
from quire.sim.tables import Source


@dataclass(frozen=True, slots=True)
class Offered:
    """A load: requests a second, and the requests."""

    rate: float
    asks: Sequence[Ask]


@dataclass(frozen=True, slots=True)
class Question:
    source: Source
    devices: Sequence[Device]
    most: int  # devices in all
    loads: Sequence[Offered]
    promise: Promise
    prices: Mapping[str, float] = field(default_factory=dict)  # of an hour of a device
    budget: float | None = None  # for an hour
    attain: float = 0.9  # share of requests that must keep the promise
    policy: Policy = "prefix"
    apart: Link | None = None  # prompts on engines of their own are tried too, over this link
    settle: Callable[[SimEngine], SimEngine] = lambda engine: engine  # limits, before pages

    def most_of(self, device: Device) -> int:
        if self.budget is None or device.name not in self.prices:
            return self.most
        return min(self.most, int(self.budget / self.prices[device.name] + 1e-9))


@dataclass(frozen=True, slots=True)
class Option:
    device: Device
    layout: Layout
    replicas: int
    prefill: int = 0  # more of them, which compute prompts for the others

    @property
    def num_devices(self) -> int:
        return self.layout.num_devices * (self.replicas + self.prefill)

    @property
    def engines(self) -> str:
        apart = f" + {self.prefill} that prefill" if self.prefill else ""
        return f"{self.replicas}{apart} x ({self.layout})"

    def __str__(self) -> str:
        return f"{self.engines} of {self.device.name}"


@dataclass(frozen=True, slots=True)
class AtRate:
    """What one rate saw of an option."""

    rate: float
    share: float  # of requests within the promise
    good_tokens_s: float  # output tokens within the promise, at the rate that was offered
    ttft_ms: Mapping[str, float]
    longest_gap_ms: Mapping[str, float]  # of each request


@dataclass(frozen=True, slots=True)
class Answer:
    option: Option
    label: str  # of the step times
    source: str  # what they were made from
    rates: Sequence[AtRate]
    best: AtRate | None  # None: at no rate did enough requests keep the promise
    price: float | None  # an hour of all devices

    @property
    def goodput(self) -> float:
        """Requests a second within the promise."""
        return self.best.rate * self.best.share if self.best else 0.0

    @property
    def cost(self) -> float | None:
        """Of a million output tokens within the promise."""
        if self.price is None or self.best is None:
            return None
        return self.price / 3600.0 / self.best.good_tokens_s * 1e6

    def record(self) -> dict[str, Any]:
        found = {
            "device": self.option.device.name,
            "tp": self.option.layout.tp,
            "pp": self.option.layout.pp,
            "replicas": self.option.replicas,
            "prefill": self.option.prefill,
            "devices": self.option.num_devices,
            "costs": self.label,
            "goodput": round(self.goodput, 4),
            "price_per_hour": self.price,
            "price_per_million_output_tokens": self.cost,
        }
        seen = [
            {
                "rate": one.rate,
                "share": round(one.share, 4),
                "good_output_tokens_per_s": round(one.good_tokens_s, 2),
                "ttft_ms": one.ttft_ms,
                "longest_gap_ms": one.longest_gap_ms,
            }
            for one in self.rates
        ]
        return {
            **found,
            "costs_source": self.source,
            "rate": self.best.rate if self.best else None,
            "rates": seen,
        }


@dataclass(frozen=True, slots=True)
class Refused:
    device: str
    layout: Layout
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    answers: Sequence[Answer]
    refused: Sequence[Refused]

    def by_goodput(self) -> list[Answer]:
        """Of equals the cheaper one, or the one with fewer devices."""
        good = [one for one in self.answers if one.best]
        return sorted(good, key=lambda one: (-one.goodput, *_expense(one)))

    def by_cost(self) -> list[Answer]:
        good = [one for one in self.answers if one.cost is not None]
        return sorted(good, key=lambda one: (one.cost or 0.0, -one.goodput, *_expense(one)))


def _expense(one: Answer) -> tuple[float, int, int]:
    return (one.price or 0.0, one.option.num_devices, one.option.layout.num_devices)


def layouts(most: int) -> Iterator[Layout]:
    """Ranks and stages in powers of two."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    yield from (Layout(tp, pp) for tp in powers for pp in powers if tp * pp <= most)


def search(question: Question, note: Callable[[str], None] = lambda line: None) -> Plan:
    answers, refused = list[Answer](), list[Refused]()
    for device in question.devices:
        for layout in layouts(question.most_of(device)):
            try:
                engine = engine_on(question, device, layout)
            except (NotSupported, OutOfMemory) as error:
                refused.append(Refused(device.name, layout, str(error)))
                continue
            for count in range(1, question.most_of(device) // layout.num_devices + 1):
                found = [
                    answer(question, engine, Option(device, layout, count - prefill, prefill))
                    for prefill in range(count if question.apart else 1)
                ]
                answers += found
                for one in found:
                    note(f"{one.option}: goodput {one.goodput:.2f} requests/s")
                if max(one.goodput for one in found) == max(load.rate for load in question.loads):
                    break
    return Plan(answers, refused)


def engine_on(question: Question, device: Device, layout: Layout) -> SimEngine:
    """Raises NotSupported or OutOfMemory where the devices cannot hold it."""
    costs = question.source.on(device, layout)
    return question.source.sized(question.settle(SimEngine.of(costs)), device, layout)


def answer(question: Question, engine: SimEngine, option: Option) -> Answer:
    seen = [_at_rate(question, engine, option, load) for load in question.loads]
    enough = [one for one in seen if one.share >= question.attain]
    best = max(enough, key=lambda one: one.rate * one.share, default=None)
    price = question.prices.get(option.device.name)
    whole = None if price is None else price * option.num_devices
    return Answer(option, engine.costs.label, engine.costs.source, seen, best, whole)


def _at_rate(question: Question, engine: SimEngine, option: Option, load: Offered) -> AtRate:
    if option.prefill:
        engine = replace(engine, places=Places(engines=question.apart))
    fleet = Fleet(engine, option.replicas, question.policy, option.prefill)
    outcomes = simulate(fleet, load.asks).outcomes
    kept = [one for one in outcomes if question.promise.is_kept(one)]
    share = len(kept) / len(outcomes)
    tokens = sum(one.num_output for one in kept) / len(outcomes)
    times = [timings(one) for one in outcomes]
    ttft = spread([one["ttft"] for one in times]) or {}
    gap = spread([one["gap"] for one in times]) or {}
    return AtRate(load.rate, share, tokens * load.rate, ttft, gap)
