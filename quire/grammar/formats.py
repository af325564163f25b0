"""String formats in JSON schemas: which ones are enforced, and dates that exist.

The compiler knows some formats, refuses a schema that names any other, and takes February 29 in
every year. `settle_formats` therefore gives dates and times a pattern of our own and leaves out
what nobody enforces; `spec.py` calls it before a schema is compiled.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

Schema: TypeAlias = dict[str, Any]

COMPILED = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})

# There is no year 0000: hardly a library that reads dates knows one.
_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH = r"(?:0[48]|[2468][048]|[13579][26])"  # 04, 08, ... 96
_LEAP_YEAR = rf"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
# RFC 3339 without leap seconds, of which no library reads more than the real ones, if any.
_HOUR_MINUTE = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR_MINUTE})"
PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}

# Keywords whose values are no schemas, and those that hold schemas by names the client chose.
_DATA = frozenset({"const", "enum", "default", "examples"})
_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)


class Settled(NamedTuple):
    schema: Schema
    ignored: list[str]  # formats that are not enforced, each once


def settle_formats(schema: Schema) -> Settled:
    """A copy with the formats the compiler can enforce. How deep it nests must be bounded."""
    ignored: dict[str, None] = {}
    return Settled(_settle(schema, ignored), list(ignored))


def _settle(schema: Schema, ignored: dict[str, None]) -> Schema:
    settled = {key: _settle_value(key, value, ignored) for key, value in schema.items()}
    name = settled.get("format")
    if not isinstance(name, str) or name in COMPILED:
        return settled
    del settled["format"]
    if name in PATTERNS:
        # Not as `pattern`: the schema may have one, and both must hold.
        others = settled.get("allOf", [])
        if isinstance(others, list):  # else it is no schema, which is the compiler's to say
            settled["allOf"] = [*others, {"pattern": PATTERNS[name]}]
    elif _may_be_text(settled.get("type", "string")):
        ignored[name] = None
    return settled


def _settle_value(key: str, value: Any, ignored: dict[str, None]) -> Any:
    if key in _DATA:
        return value
    if isinstance(value, list):
        return [_settle(item, ignored) if isinstance(item, dict) else item for item in value]
    if not isinstance(value, dict):
        return value
    if key not in _BY_NAME:
        return _settle(value, ignored)
    return {
        name: _settle(item, ignored) if isinstance(item, dict) else item
        for name, item in value.items()
    }


def _may_be_text(kinds: object) -> bool:
    """Formats of numbers, such as int32, are notes for programs that read the schema."""
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
