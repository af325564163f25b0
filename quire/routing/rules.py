"""Rules by hand: conditions on a request, and the model that answers where they hold."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.routing.ask import Ask
from quire.routing.settings import Rule

MAX_CHARS = 20_000  # of a text that a pattern is looked for in


def first_rule(rules: Sequence[Rule], ask: Ask) -> Rule | None:
    """
    >>> rule = Rule(model="large", regex="(?i)prove", max_chars=40)
    >>> first_rule([rule], Ask("Prove it.")) is rule, first_rule([rule], Ask("Say hi."))
    (True, None)
    """
    return next((rule for rule in rules if _fits(rule, ask)), None)


def name_of(rules: Sequence[Rule], rule: Rule) -> str:
    """As headers and metrics tell it: rules without a name go by their number."""
    return rule.name or str(rules.index(rule) + 1)


def _fits(rule: Rule, ask: Ask) -> bool:
    chars = len(ask.text) + len(ask.context)
    return (
        (rule.min_chars is None or chars >= rule.min_chars)
        and (rule.max_chars is None or chars <= rule.max_chars)
        and (rule.min_messages is None or ask.num_messages >= rule.min_messages)
        and (rule.tools is None or rule.tools == bool(ask.num_tools))
        and (rule.images is None or rule.images == bool(ask.num_images))
        and (rule.schema is None or rule.schema == ask.has_schema)
        and (rule.regex is None or bool(re.search(rule.regex, ask.text[:MAX_CHARS])))
    )
