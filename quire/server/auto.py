"""Auto: who answers a request for the model "auto", and why.

Rules by hand come first, then the learned chance that the small model suffices, then its own
logprobs (`cascade.py`); a key that has used up its budget of the large model gets the small one.
What was decided is in the header `x-quire-route` and in the metric `route_requests`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import NamedTuple

import msgspec

from quire.routing.ask import Ask, read_ask
from quire.routing.budget import Budget
from quire.routing.chance import Chance
from quire.routing.rules import first_rule, name_of
from quire.routing.settings import AUTO, AutoSettings
from quire.server.cascade import Escalated, Gate
from quire.server.http import HttpRequest
from quire.server.problems import Problem
from quire.server.server import Server
from quire.server.spending import Spending

HEADER = b"x-quire-route"
# Paths where a model answers, and so one can be chosen.
PATHS = frozenset(
    (
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/v1/generate", "/api/chat", "/api/generate"),
    )
)


class Choice(NamedTuple):
    model: str
    reason: str  # rule, chance, cascade, budget, unavailable or escalated
    note: str = ""


@dataclass(slots=True)
class Routed:
    """What became of one request."""

    auto: Auto
    choice: Choice
    gate: Gate | None = None  # None: the answer is sent as it comes

    def spend(self, server: Server, request: HttpRequest, tokens: int) -> None:
        auto, caller = self.auto, request.caller
        if auto.spending is not None and server.model_names[0] == auto.settings.large:
            auto.spending.spend(caller.salt if caller is not None else "", tokens)


class Auto:
    def __init__(
        self,
        settings: AutoSettings,
        servers: Mapping[str, Server],
        is_failed: Callable[[str], bool],
    ) -> None:
        """Raises BadRequest for a route that cannot be read."""
        self.settings, self.servers, self._is_failed = settings, servers, is_failed
        self.chance = Chance.load(Path(settings.route)) if settings.route else None
        self.spending: Spending | None = None
        if settings.budget is not None:
            shelf = servers[settings.small].shelf
            database = shelf.database if shelf is not None else None
            self.spending = Spending(Budget(settings.budget), database)
        self._gate = _gate(settings, self.chance)

    def choose(self, request: HttpRequest) -> Server:
        """Raises Problem where there is nothing to choose."""
        if request.path not in PATHS:
            known = ", ".join(self.servers)
            text = f"model {AUTO!r} is for answers; name a model here: {known}"
            raise Problem(400, text, param="model")
        ask = _ask(request)
        choice = self._within_budget(self._choice(ask), request)
        is_watched = choice.reason in ("chance", "cascade") and choice.model == self.settings.small
        request.route = Routed(self, choice)
        if is_watched and ask.num_prompts == 1 and self._has_large(request):
            request.route.gate = self._gate
        return self._tell(request, choice)

    def escalate(self, request: HttpRequest, why: Escalated) -> Server:
        """The small model's answer will not do: begin anew."""
        choice = Choice(self.settings.large, "escalated", str(why))
        request.route = Routed(self, choice)
        request.warnings.clear()
        request.answer_headers.clear()
        request.notes.clear()
        return self._tell(request, choice)

    # ------------------------------------------------------------ deciding

    def _choice(self, ask: Ask) -> Choice:
        own = self.settings
        if (rule := first_rule(own.rules, ask)) is not None:
            return Choice(rule.model, "rule", f"rule={name_of(own.rules, rule)}")
        for name, other in ((own.small, own.large), (own.large, own.small)):
            if self._is_failed(name):
                return Choice(other, "unavailable", f"{name} failed to load")
        if self.chance is None:
            return Choice(own.small, "cascade" if own.cascade else "default")
        chance = self.chance.of(ask)
        limit = self.chance.threshold if own.threshold is None else own.threshold
        if chance >= limit:
            return Choice(own.small, "chance", f"chance={chance:.2f}>={limit:.2f}")
        return Choice(own.large, "chance", f"chance={chance:.2f}<{limit:.2f}")

    def _within_budget(self, choice: Choice, request: HttpRequest) -> Choice:
        if choice.model != self.settings.large or self._has_budget(request):
            return choice
        return Choice(self.settings.small, "budget", "the key's budget is used up")

    def _has_budget(self, request: HttpRequest) -> bool:
        caller = request.caller
        if self.spending is None:
            return True
        salt, weight = ("", 1.0) if caller is None else (caller.salt, caller.weight)
        return self.spending.budget.left(salt, weight) > 0

    def _has_large(self, request: HttpRequest) -> bool:
        return self._has_budget(request) and not self._is_failed(self.settings.large)

    def _tell(self, request: HttpRequest, choice: Choice) -> Server:
        server = self.servers[choice.model]
        text = "; ".join(filter(None, (choice.model, f"reason={choice.reason}", choice.note)))
        request.answer_headers.append((HEADER, text.encode("ascii", "replace")))
        return server


def _gate(settings: AutoSettings, chance: Chance | None) -> Gate | None:
    cascade = settings.cascade
    if cascade is None:
        return None
    learned = chance.mean_logprob if chance is not None else None
    mean = learned if cascade.mean_logprob is None else cascade.mean_logprob
    least = cascade.min_logprob
    return Gate(cascade.tokens, -inf if mean is None else mean, -inf if least is None else least)


def _ask(request: HttpRequest) -> Ask:
    try:
        body = msgspec.json.decode(request.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        body = None  # the handler says what is wrong with it
    return read_ask(body if isinstance(body, dict) else {})
