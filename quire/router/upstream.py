"""Upstream: one server behind the router, and what is known of it. No sockets here."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from quire.router.first_token import FirstTokenTimes
from quire.router.prefix_index import PrefixIndex
from quire.router.settings import UpstreamAddress


class State(Enum):
    UP = "up"
    DOWN = "down"  # does not answer, or says that it is not ready
    DRAINING = "draining"  # gets nothing more; what it has may finish


@dataclass(slots=True, eq=False)
class Upstream:
    address: UpstreamAddress
    state: State = State.DOWN
    is_leaving: bool = False  # drained by an operator, whatever it says of itself
    reason: str = "not seen yet"
    num_open: int = 0  # requests it has from us
    pending_tokens: int = 0  # of them, to be computed before their first token
    regret_s: float = 0.0  # that requests waited there lately and need not have elsewhere
    num_sent: int = 0
    num_failed: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    index: PrefixIndex = field(default_factory=PrefixIndex)
    times: FirstTokenTimes = field(default_factory=FirstTokenTimes)

    @property
    def name(self) -> str:
        return self.address.name

    def is_usable(self) -> bool:
        return self.state is State.UP and not self.is_leaving

    def went_down(self, reason: str) -> None:
        self.state, self.reason = State.DOWN, reason
        self.index.forget()

    def came_up(self) -> None:
        self.state, self.reason = State.UP, ""

    def shape(self, now: float) -> dict[str, Any]:
        """For whoever asks how things stand."""
        token_s, request_s = self.times.rates
        state = State.DRAINING if self.is_leaving and self.state is State.UP else self.state
        return {
            "name": self.name,
            "state": state.value,
            "reason": self.reason,
            "open_requests": self.num_open,
            "pending_tokens": self.pending_tokens,
            "requests": self.num_sent,
            "failures": self.num_failed,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens_expected": self.hit_tokens,
            "known_prefix_pages": len(self.index),
            "publishes_cache": self.index.is_published,
            "cache_news_stale": self.index.is_stale(now),
            "resyncs": self.index.num_resyncs,
            "seconds_per_token": token_s,
            "seconds_per_request": request_s,
        }
