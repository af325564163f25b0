"""Grammars with an oracle nobody here wrote: `json` and `jsonschema`, `re`, plain membership."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.grammar.matcher import GrammarCompiler, Matcher, num_words
from quire.params import StructuredOutputsParams
from tests.text.tiny_tokenizers import byte_level

EOS = 1
VOCAB = byte_level().get_vocab_size()


@dataclass(frozen=True)
class Wish:
    name: str
    params: StructuredOutputsParams
    holds: Callable[[str], bool]


def _schema(name: str, schema: dict[str, Any]) -> Wish:
    def holds(text: str) -> bool:
        import jsonschema  # other cases do without

        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError):
            return False
        return True

    return Wish(name, StructuredOutputsParams(json=schema), holds)


def _regex(name: str, regex: str) -> Wish:
    pattern = re.compile(regex, re.ASCII)
    params = StructuredOutputsParams(regex=regex)
    return Wish(name, params, lambda text: pattern.fullmatch(text) is not None)


def _choice(name: str, *choices: str) -> Wish:
    return Wish(name, StructuredOutputsParams(choice=list(choices)), lambda text: text in choices)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


CLOSED = {"additionalProperties": False}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    **CLOSED,
}
UNION = {
    "anyOf": [
        {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"], **CLOSED},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    ]
}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
LIST = {
    "$defs": {
        "node": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}]},
        "pair": {
            "type": "array",
            "prefixItems": [DIGIT, {"$ref": "#/$defs/node"}],
            "items": False,
            "minItems": 2,
        },
    },
    "$ref": "#/$defs/pair",
}

WISHES = [
    _choice("choice", "yes", "no", "maybe so"),
    _choice("choice-prefixes", "a", "ab", "abc", 'quo"te', "new\nline", "日本", "back\\slash/"),
    _regex("regex", r"[a-f]{2}-\d{1,3}(x|yz)?"),
    _regex("regex-anchored", r"^(0|1)+/[a-z]\d?$"),
    _schema("person", PERSON),
    _schema("union", UNION),
    _schema("recursive", LIST),
    Wish("object", StructuredOutputsParams(json_object=True), _is_object),
    Wish(
        "gbnf",
        StructuredOutputsParams(grammar='root ::= "<" item+ ">"\nitem ::= [a-c] | root\n'),
        lambda text: (
            re.fullmatch(r"[<>abc]+", text) is not None
            and text.count("<") == text.count(">")
            and text.startswith("<")
            and "<>" not in text
        ),
    ),
    Wish(
        "lark",
        StructuredOutputsParams(grammar='start: sum\nsum: NUM ("+" NUM)*\nNUM: /[0-9]{1,2}/\n'),
        lambda text: re.fullmatch(r"\d{1,2}(\+\d{1,2})*", text) is not None,
    ),
]


def compiler(vocab_size: int = VOCAB, eos_ids: tuple[int, ...] = (EOS,)) -> GrammarCompiler:
    return GrammarCompiler(byte_level().to_str, vocab_size, eos_ids)


def allowed(matcher: Matcher, vocab_size: int = VOCAB) -> set[int]:
    """What may come next, one token at a time and with nothing shared with the code under test."""
    row = np.full(num_words(vocab_size), -1, np.int32)
    matcher.fill(row)
    bits = "".join(f"{int(word) & 0xFFFFFFFF:032b}"[::-1] for word in row)
    return {token for token, bit in enumerate(bits) if bit == "1"}
