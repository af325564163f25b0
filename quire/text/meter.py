"""Meter: what one chat-template render may cost, counted as it runs.

A template is a program from a model file, so every value it builds is weighed (roughly its bytes)
and every step is charged against one budget; processor time is the last resort. Containers are
weighed deeply but only once, so a list that holds itself twice, forty times over, is refused when
it is built rather than when something walks it. `sandbox.py` decides where to charge.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_WORK = 64_000_000  # units: one step, or about one byte handled
WORK_PER_INPUT = 64  # long conversations may cost more, in proportion
MAX_VALUE = 8_000_000  # weight of any one value
VALUE_PER_INPUT = 4
MAX_DEPTH = 64
MAX_SECONDS = 2.0  # of this thread's processor time, so a busy machine fails nobody
SECONDS_PER_INPUT = 1e-6
UNITS_PER_CLOCK = 4096

SLOT_WEIGHT = 16  # a place in a container, apart from what is in it
_LAZY: tuple[type[Any], ...] = (type({}.keys()), type({}.values()), type({}.items()), range)


class LimitReached(Exception):
    """A template asked for more than a render may cost."""


class Meter:
    """The budget of one render.

    >>> meter = Meter()
    >>> meter.weigh(["ab", "c"])
    53
    """

    __slots__ = (
        "_deadline",
        "_kept",
        "_left",
        "_max_seconds",
        "_until_clock",
        "_weights",
        "max_value",
    )

    def __init__(self, input_weight: int = 0) -> None:
        self.max_value = MAX_VALUE + VALUE_PER_INPUT * input_weight
        self._left = MAX_WORK + WORK_PER_INPUT * input_weight
        self._until_clock = UNITS_PER_CLOCK
        self._max_seconds = MAX_SECONDS + SECONDS_PER_INPUT * input_weight
        self._deadline = time.thread_time() + self._max_seconds
        self._weights: dict[int, int] = {}
        self._kept: list[object] = []  # keeps ids in _weights from being reused

    def spend(self, units: int) -> None:
        self._left -= units
        self._until_clock -= units
        if self._left < 0:
            raise LimitReached("it does more work than one render may")
        if self._until_clock < 0:
            self._until_clock = UNITS_PER_CLOCK
            if time.thread_time() > self._deadline:
                raise LimitReached(f"it runs longer than {self._max_seconds:.1f} s")

    def make_room(self, weight: int) -> None:
        """Charge for a value about to be built; refuse it if it would be too large."""
        if weight > self.max_value:
            raise LimitReached(f"it builds a value of {weight} bytes, the most is {self.max_value}")
        self.spend(weight)

    def weigh(self, value: object) -> int:
        """Charge for an operation that goes through all of a value; returns its weight."""
        weight = self._check(value)
        self.spend(weight)
        return weight

    def hold(self, value: object) -> None:
        """Charge for a value just built, or looped over: its own slots, not what is in them."""
        weight = self._check(value)
        self.spend(len(value) + 1 if isinstance(value, (list, tuple, dict)) else weight)

    def _check(self, value: object) -> int:
        weight = self._weight(value, 0)
        if weight > self.max_value:
            raise LimitReached(f"it builds a value over {self.max_value} bytes")
        return weight

    def _weight(self, value: object, depth: int) -> int:
        if isinstance(value, str):
            return len(value) + 1
        if isinstance(value, int):
            return 1 + value.bit_length() // 8
        if isinstance(value, (list, tuple, dict)):
            known = self._weights.get(id(value))
            return self._walk(value, depth) if known is None else known
        return 1 + SLOT_WEIGHT * len(value) if isinstance(value, _LAZY) else 1

    def _walk(self, value: list[Any] | tuple[Any, ...] | dict[Any, Any], depth: int) -> int:
        if depth > MAX_DEPTH:
            raise LimitReached(f"a value is nested deeper than {MAX_DEPTH}")
        weight = SLOT_WEIGHT * (len(value) + 1)
        if weight > self.max_value:
            raise LimitReached(f"it builds a value over {self.max_value} bytes")
        self.spend(len(value))
        for item in value:
            weight += self._weight(item, depth + 1)
        if isinstance(value, dict):
            for item in value.values():
                weight += self._weight(item, depth + 1)
        self._weights[id(value)] = weight
        self._kept.append(value)
        return weight


_active: ContextVar[Meter | None] = ContextVar("quire_template_meter", default=None)


def current_meter() -> Meter:
    """The meter of the render under way; a fresh one outside of any."""
    return _active.get() or Meter()


@contextmanager
def metered(meter: Meter) -> Iterator[Meter]:
    token = _active.set(meter)
    try:
        yield meter
    finally:
        _active.reset(token)
