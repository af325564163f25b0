"""The filters and string methods a chat template may use, each with a bound on what it builds.

Templates get an allow-list, not Jinja's full set: `center(10**9)` or `round(10**9)` are one short
call and gigabytes of work. Those that can grow their input are written here with the size checked
first; the rest are Jinja's own, weighed on the way in and out. `sandbox.py` installs them.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from itertools import chain
from types import NoneType
from typing import Any, TypeAlias

from jinja2 import Environment, pass_context, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Context, Undefined, markup_join
from jinja2.tests import TESTS
from jinja2.utils import Namespace

from quire.text.meter import LimitReached, current_meter

# Jinja hands over whatever the template holds; Any is the honest type at this border.
Value: TypeAlias = Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


STR_METHODS = _names(
    "capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal "
    "isdigit islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix "
    "removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith "
    "strip swapcase title upper"
)
DICT_METHODS = _names("get items keys values")
LIST_METHODS = _names("count index")

_PLAIN_FILTERS = _names(
    "abs attr capitalize count d default dictsort e escape first float groupby int items last "
    "length list lower map max min reject rejectattr reverse safe select selectattr sort string "
    "title truncate unique upper urlencode wordcount"
)
# Filters and tests by what they cost; any other goes through all of its arguments.
_CONSTANT_TIME = _names(
    "abs attr boolean callable count d default defined divisibleby even false filter first "
    "integer items iterable last length mapping none number odd sameas sequence test true "
    "undefined"
)
_ONE_PASS = _names("list map reject rejectattr reverse select selectattr")

MAX_FORMAT_WIDTH = 999
MAX_INDENT = 256
MAX_DIGITS = 32  # of round()
MAX_INT_BITS = 4096

# A width or precision that is computed or has four digits, or a key with parentheses of its own.
_WIDE_PERCENT = re.compile(r"%\([^()]*\(|%(\([^()]*\))?[#0\- +]*(\*|\d{4,}|\d*\.(\*|\d{4,}))")


class PlainNamespace(Namespace):
    """A namespace that does not print what it holds: that could be a graph, printed as a tree."""

    def __repr__(self) -> str:
        return "<Namespace>"


def make_dict(*args: Value, **kwargs: Value) -> dict[Value, Value]:
    """`dict` as a function: the type itself would offer dict.update on the caller's messages."""
    return dict(*args, **kwargs)


def as_text(value: Value) -> str:
    """What printing a value gives, charged for."""
    meter = current_meter()
    if isinstance(value, str):
        text = value
    else:
        meter.weigh(value)
        text = str(value)
    meter.spend(len(text) + 1)
    return text


@pass_context  # needing the context keeps the compiler from folding what must be charged per run
def weighed_at_run(context: Context, value: Value) -> Value:
    current_meter().weigh(value)
    return value


@pass_context
def held_at_run(context: Context, value: Value) -> Value:
    current_meter().hold(value)
    return value


@pass_context
def charged_at_run(context: Context, units: int) -> str:
    current_meter().spend(units)
    return ""


@pass_context
def text_at_run(context: Context, value: Value) -> str:
    return as_text(value)


@pass_context
def concat_at_run(context: Context, pieces: list[Value]) -> str:
    """The ~ operator."""
    texts = [as_text(piece) for piece in pieces]
    current_meter().make_room(sum(map(len, texts)))
    return markup_join(texts) if context.eval_ctx.autoescape else "".join(texts)


def held(value: Value) -> Value:
    current_meter().hold(value)
    return value


def replace(value: Value, old: Value, new: Value, count: int | None = None) -> str:
    text, old, new = as_text(value), as_text(old), as_text(new)
    limit = -1 if count is None else count
    hits = text.count(old) if old else len(text) + 1
    if limit >= 0:
        hits = min(hits, limit)
    current_meter().make_room(len(text) + hits * len(new))
    return text.replace(old, new, limit)


@pass_environment
def join(
    env: Environment, value: Iterable[Value], d: Value = "", attribute: str | int | None = None
) -> str:
    items = list(value if attribute is None else map(make_attrgetter(env, attribute), value))
    return join_texts(as_text(d), [as_text(item) for item in items])


def join_texts(separator: str, texts: Iterable[Value]) -> str:
    pieces = list(texts)
    lengths = (len(piece) if isinstance(piece, str) else 1 for piece in pieces)
    current_meter().make_room(sum(lengths) + len(separator) * len(pieces))
    return separator.join(pieces)


def strip(text: Value, chars: str | None = None, method: Callable[..., str] = str.strip) -> str:
    text = as_text(text)
    if chars is not None:
        current_meter().make_room(len(text) * (1 + len(chars) // 64))
    return method(text, chars)


def indent(text: Value, width: int | str = 4, first: bool = False, blank: bool = False) -> Value:
    if (len(width) if isinstance(width, str) else width) > MAX_INDENT:
        raise LimitReached(f"it indents by {width!r}, the most is {MAX_INDENT}")
    return FILTERS["indent"](as_text(text), width, first, blank)


def round_(value: float, precision: int = 0, method: str = "common") -> Value:
    if abs(precision) > MAX_DIGITS:
        raise LimitReached(f"it rounds to {precision} digits, the most is {MAX_DIGITS}")
    return FILTERS["round"](value, precision, method)


def sum_(values: Iterable[Value], start: Value = 0) -> Value:
    return sum(values, start if isinstance(start, (int, float)) else 0)


def tojson(
    value: Value,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escaping: the text goes to a model, not a browser."""
    if isinstance(value, Undefined):
        raise TypeError(f"{value._undefined_name!r} is undefined")
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > MAX_INDENT:
        raise LimitReached(f"it indents by {indent!r}, the most is {MAX_INDENT}")
    weight = current_meter().weigh(value)
    if indent:
        current_meter().make_room(weight * (len(indent) if isinstance(indent, str) else indent))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def percent_format(template: str, values: Value) -> str:
    """The % operator on strings, and the format filter."""
    if hit := _WIDE_PERCENT.search(template):
        raise LimitReached(f"it formats with {hit[0]!r}, widths go up to {MAX_FORMAT_WIDTH}")
    _check_fields(template.count("%"), len(template), [values])
    formatted: str = template % values
    return formatted


def format_filter(template: Value, *args: Value, **kwargs: Value) -> str:
    if args and kwargs:
        raise TypeError("can't mix positional and keyword arguments in format")
    return percent_format(as_text(template), kwargs or args)


def check_brace_format(template: str, values: list[Value]) -> None:
    """Refuse str.format calls with huge or computed widths."""
    for _, _, spec, _ in string.Formatter().parse(template):
        if spec and ("{" in spec or re.search(r"\d{4,}", spec)):
            raise LimitReached(f"it formats with {spec!r}, widths go up to {MAX_FORMAT_WIDTH}")
    _check_fields(template.count("{"), len(template), values)


def _check_fields(fields: int, length: int, values: list[Value]) -> None:
    weight = 0
    for value in values:
        if not isinstance(value, (str, int, float, list, tuple, dict, Undefined, NoneType)):
            raise SecurityError(f"a template may not format a {type(value).__name__}")
        weight += current_meter().weigh(value)
    current_meter().make_room(length + fields * (weight + MAX_FORMAT_WIDTH))


def multiply(left: Value, right: Value) -> Value:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for many, times in ((left, right), (right, left)):
        if isinstance(many, (str, list, tuple)) and isinstance(times, int):
            current_meter().make_room(current_meter().weigh(many) * max(times, 0))
    return held(left * right)


def power(left: Value, right: Value) -> Value:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 0))
    return left**right


def add(left: Value, right: Value) -> Value:
    for side in (left, right):
        current_meter().hold(side)
    return held(left + right)


def modulo(left: Value, right: Value) -> Value:
    return percent_format(left, right) if isinstance(left, str) else left % right


def _check_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise LimitReached(f"it computes a number of {bits} bits, the most is {MAX_INT_BITS}")


def _metered(name: str, function: Callable[..., Value]) -> Callable[..., Value]:
    @wraps(function)
    def call(*args: Value, **kwargs: Value) -> Value:
        meter = current_meter()
        if name in _CONSTANT_TIME:
            meter.spend(1)
            return function(*args, **kwargs)
        charge = meter.hold if name in _ONE_PASS else meter.weigh
        for arg in chain(args, kwargs.values()):
            charge(arg)
        return held(function(*args, **kwargs))

    return call


def filters() -> Mapping[str, Callable[..., Value]]:
    own = {
        "format": format_filter,
        "indent": indent,
        "join": join,
        "replace": replace,
        "round": round_,
        "sum": sum_,
        "tojson": tojson,
        "trim": strip,
    }
    chosen = {name: FILTERS[name] for name in _PLAIN_FILTERS} | own
    return {name: _metered(name, function) for name, function in chosen.items()}


def tests() -> Mapping[str, Callable[..., Value]]:
    all_tests: Mapping[str, Callable[..., Value]] = TESTS  # type: ignore[assignment]
    return {name: _metered(name, function) for name, function in all_tests.items()}


BINARY_OPERATORS: Mapping[str, Callable[[Value, Value], Value]] = {
    "+": add,
    "*": multiply,
    "**": power,
    "%": modulo,
}

STR_BOUNDED: Mapping[str, Callable[..., Value]] = {
    "join": join_texts,
    "replace": lambda text, old, new, count=-1: replace(text, old, new, count),
    "strip": lambda text, chars=None: strip(text, chars, str.strip),
    "lstrip": lambda text, chars=None: strip(text, chars, str.lstrip),
    "rstrip": lambda text, chars=None: strip(text, chars, str.rstrip),
}
