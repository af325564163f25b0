"""From StructuredOutputsParams to the text of an llguidance grammar, within fixed limits.

Everything that can be refused without compiling is refused here, cheaply and by name: sizes,
nesting, references that would have to be fetched. What remains is for `matcher.py` to compile.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec

from quire.errors import BadRequest, NotSupported
from quire.grammar.formats import settle_formats
from quire.params import StructuredOutputsParams

MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 64
MAX_REGEX_BYTES = 4 << 10
MAX_CHOICES = 1000
MAX_CHOICE_BYTES = 64 << 10
MAX_GRAMMAR_BYTES = 64 << 10

PARAM = "structured_outputs"
NOTHING_LEFT = "no token is left that both the grammar and the other sampling parameters allow"

# Without a bound a model may write blanks until it runs out of tokens.
WHITESPACE = r"[ \t\n\r]{1,64}"

_GBNF_RULE = re.compile(r"^\s*[\w.-]+\s*::=", re.MULTILINE)


def require_llguidance() -> None:
    if find_spec("llguidance") is None:
        raise NotSupported("structured outputs need llguidance: pip install llguidance")


def check_limits(params: StructuredOutputsParams) -> None:
    """Raises BadRequest for what is refused whatever a compiler would say of it."""
    if params.json is not None:
        _schema(params.json)
    elif params.regex is not None:
        _check_bytes("regex", params.regex, MAX_REGEX_BYTES)
    elif params.choice is not None:
        if len(params.choice) > MAX_CHOICES:
            raise _too_large("choice", len(params.choice), MAX_CHOICES, "choices")
        _check_bytes("choice", "".join(params.choice), MAX_CHOICE_BYTES)
    elif params.grammar is not None:
        _check_bytes("grammar", params.grammar, MAX_GRAMMAR_BYTES)


def grammar_text(params: StructuredOutputsParams) -> str:
    """What llguidance compiles. Raises BadRequest as `check_limits` does, or for bad EBNF."""
    check_limits(params)
    if params.json is not None:
        return _json_grammar(_schema(params.json))
    if params.regex is not None:
        from llguidance import regex_to_lark

        # Digits are 0 to 9, as most who write \d mean; letters are those of all languages.
        return _lark_grammar(f"start: /{regex_to_lark(_unanchored(params.regex), 'd')}/")
    if params.choice is not None:
        return _lark_grammar("start: " + " | ".join(json.dumps(c) for c in params.choice))
    if params.grammar is not None:
        return _lark_grammar(_as_lark(params.grammar))
    return _json_grammar({"type": "object"})


def ignored_formats(params: StructuredOutputsParams) -> list[str]:
    """String formats of a JSON schema that nobody enforces. Raises as `check_limits` does."""
    return [] if params.json is None else settle_formats(_schema(params.json)).ignored


def _json_grammar(schema: dict[str, object]) -> str:
    settled = settle_formats(schema).schema
    # Set last, so that a client cannot loosen the compiler's options through its schema.
    options = {"whitespace_pattern": WHITESPACE}
    return json.dumps({"grammars": [{"json_schema": {**settled, "x-guidance": options}}]})


def _lark_grammar(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


# ---------------------------------------------------------------- JSON schema


def _schema(text: object) -> dict[str, object]:
    assert isinstance(text, str), "params store schemas as text"
    _check_bytes("json", text, MAX_SCHEMA_BYTES)
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadRequest(f"the JSON schema is not JSON: {why}", param=PARAM) from None
    if not isinstance(schema, dict):
        raise BadRequest(
            f"the JSON schema is a {type(schema).__name__}, want an object", param=PARAM
        )
    _check_nodes(schema)
    return schema


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _check_nodes(schema: dict[str, object]) -> None:
    """Walk without recursion: the depth is what is being checked."""
    level: list[object] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        deeper: list[object] = []
        for node in level:
            if isinstance(node, dict):
                _check_reference(node.get("$ref"))
                deeper += node.values()
            elif isinstance(node, list):
                deeper += node
        level = deeper
    if any(isinstance(node, (dict, list)) for node in level):
        raise _too_large("json", f"more than {MAX_SCHEMA_DEPTH}", MAX_SCHEMA_DEPTH, "levels")


def _check_reference(reference: object) -> None:
    if isinstance(reference, str) and not reference.startswith("#"):
        raise BadRequest(
            f"got $ref={reference[:80]!r} in the JSON schema, want '#/...' within the same schema;"
            " nothing is ever fetched",
            param=PARAM,
        )


# ---------------------------------------------------------------- regex and EBNF


def _unanchored(regex: str) -> str:
    """The whole output must match, so anchors at the ends say nothing; the compiler has none."""
    regex = regex.removeprefix("^")
    body = regex.removesuffix("$")
    num_escapes = len(body) - len(body.rstrip("\\"))
    return regex if num_escapes % 2 else body


def _as_lark(grammar: str) -> str:
    if not _GBNF_RULE.search(grammar):
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the library raises bare ones, for instance without a root rule
        raise BadRequest(f"cannot read the grammar: {brief(str(error))}", param=PARAM) from None


# ---------------------------------------------------------------- messages


def brief(reason: str, limit: int = 300) -> str:
    """A library's message as it may be shown: one line, printable, short."""
    text = " ".join(reason.replace("<non-verbose/>", "").split())
    text = "".join(c for c in text if c.isprintable())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _check_bytes(name: str, text: str, most: int) -> None:
    size = len(text.encode())
    if size > most:
        raise _too_large(name, size, most, "bytes")


def _too_large(name: str, got: object, most: int, unit: str) -> BadRequest:
    return BadRequest(
        f"structured_outputs.{name} has {got} {unit}, want at most {most}", param=PARAM
    )
