"""AutoSettings: what `model: "auto"` means, as the table [auto] of a models file says it.

    [auto]
    small = "tiny"
    large = "coder"
    route = "route.json"            # by `quire route fit`
    threshold = 0.7                 # chance that the small one suffices; else the route's own

    [auto.cascade]                  # the small one's answer is judged before anything is sent
    tokens = 32
    mean_logprob = -1.0
    min_logprob = -8.0

    [auto.budget]                   # of the large model, for each key
    tokens = 100_000
    per_s = 86_400

    [[auto.rules]]                  # the first that fits decides
    name = "sql"
    model = "coder"
    regex = '(?i)\\bselect\\b'

Checked here, whole, before any model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from quire.errors import BadRequest

AUTO = "auto"
MAX_HELD = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """All of its conditions must hold."""

    model: str
    name: str = ""
    regex: str | None = None  # found in the last message
    min_chars: int | None = None  # of all messages together
    max_chars: int | None = None
    min_messages: int | None = None
    tools: bool | None = None  # whether some are offered
    images: bool | None = None
    schema: bool | None = None  # whether the answer must have a form


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeSettings:
    tokens: int = 32  # of the answer that are held back and judged
    mean_logprob: float | None = None  # None: as the route learned it
    min_logprob: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSettings:
    tokens: int  # prompts and answers of the large model, for a key of weight 1
    per_s: int = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoSettings:
    small: str
    large: str
    route: str = ""  # path of what `quire route fit` wrote; "": rules and cascade alone
    threshold: float | None = None
    cascade: CascadeSettings | None = None
    budget: BudgetSettings | None = None
    rules: tuple[Rule, ...] = ()


DataclassT = TypeVar("DataclassT", Rule, CascadeSettings, BudgetSettings, AutoSettings)
_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str,),
    "int": (int,),
    "int | None": (int,),
    "float | None": (int, float),
    "bool | None": (bool,),
}


def read_auto(table: object, models: Sequence[str], folder: Path) -> AutoSettings:
    """Raises BadRequest that names the field. `folder`: what paths are relative to."""
    if not isinstance(table, Mapping):
        raise BadRequest("[auto] wants to be a table")
    table = dict(table)
    cascade, budget = table.pop("cascade", None), table.pop("budget", None)
    rules = table.pop("rules", [])
    if not isinstance(rules, list):
        raise BadRequest("[auto] rules wants tables: [[auto.rules]]")
    given: dict[str, Any] = {
        "cascade": None if cascade is None else _made(CascadeSettings, cascade, "auto.cascade"),
        "budget": None if budget is None else _made(BudgetSettings, budget, "auto.budget"),
        "rules": tuple(_rule(rule, at, models) for at, rule in enumerate(rules, 1)),
    }
    made = _made(AutoSettings, table, "auto", given)
    _check(made, models)
    if made.route:
        from quire.routing.chance import Chance

        path = (folder / made.route).absolute()
        learned = Chance.load(path)
        made = _made(AutoSettings, table | {"route": str(path)}, "auto", given)
        _check_cascade(made, learned.mean_logprob)
    else:
        _check_cascade(made, None)
    return made


def _made(
    kind: type[DataclassT], table: object, where: str, more: Mapping[str, Any] | None = None
) -> DataclassT:
    """`more`: fields that are made already."""
    given: dict[str, Any] = dict(more or {})
    if not isinstance(table, Mapping):
        raise BadRequest(f"[{where}] wants to be a table")
    known = {one.name: str(one.type) for one in fields(kind)}
    if unknown := sorted(set(table) - set(known)):
        raise BadRequest(f"[{where}] has {', '.join(unknown)}, want {', '.join(sorted(known))}")
    for name, value in table.items():
        kinds = _KINDS[known[name]]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise BadRequest(f"[{where}] got {name} = {value!r}, want {known[name].split()[0]}")
    try:
        return kind(**table, **given)
    except TypeError as error:
        raise BadRequest(f"[{where}]: {error}") from None


def _rule(table: object, number: int, models: Sequence[str]) -> Rule:
    where = f"auto.rules {number}"
    made = _made(Rule, table, where)
    _check_model(where, "model", made.model, models)
    if made.regex is not None:
        try:
            re.compile(made.regex)
        except re.error as error:
            raise BadRequest(f"[{where}] regex: {error}") from None
    return made


def _check(made: AutoSettings, models: Sequence[str]) -> None:
    if AUTO in models:
        raise BadRequest(f"a model is called {AUTO!r}, which [auto] needs; give it another name")
    _check_model("auto", "small", made.small, models)
    _check_model("auto", "large", made.large, models)
    if made.small == made.large:
        raise BadRequest(f"[auto] got small = large = {made.small!r}, want two models")
    if made.threshold is not None and not 0.0 <= made.threshold <= 1.0:
        raise BadRequest(f"[auto] got threshold = {made.threshold:g}, want 0 to 1")
    if made.threshold is not None and not made.route:
        raise BadRequest("[auto] got threshold without route; a chance needs a learned route")
    if not (made.route or made.cascade or made.rules):
        raise BadRequest("[auto] wants a route, a cascade or rules to decide by")
    if made.budget is not None and (made.budget.tokens < 1 or made.budget.per_s < 1):
        raise BadRequest("[auto.budget] wants tokens and per_s >= 1")


def _check_cascade(made: AutoSettings, learned: float | None) -> None:
    cascade = made.cascade
    if cascade is None:
        return
    if not 1 <= cascade.tokens <= MAX_HELD:
        raise BadRequest(f"[auto.cascade] got tokens = {cascade.tokens}, want 1 to {MAX_HELD}")
    if cascade.mean_logprob is None and cascade.min_logprob is None and learned is None:
        raise BadRequest(
            "[auto.cascade] wants mean_logprob or min_logprob, or a route that learned one"
            " (examples with small_mean_logprob)"
        )


def _check_model(where: str, field: str, name: str, models: Sequence[str]) -> None:
    if name not in models:
        raise BadRequest(f"[{where}] got {field} = {name!r}, want one of {', '.join(models)}")
