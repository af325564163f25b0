"""A thousand ways to get a request wrong, made from a few dozen: bodies, types, numbers, text,
schemas. Deterministic, so that a failure names the case."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PLAIN = {"prompt": "hi", "max_tokens": 2}
PATHS = {
    "/v1/completions": PLAIN,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {**CHAT, "model": "tiny"},
    "/v1/embeddings": {"input": "hi"},
    "/score": {"text_1": "hi", "text_2": "ho"},
    "/rerank": {"query": "hi", "documents": ["ho"]},
    "/pooling": {"input": "hi"},
    "/v1/generate": PLAIN,
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}


class Bad(NamedTuple):
    """One request that must be answered, and not with a 5xx."""

    name: str
    path: str
    body: bytes


BROKEN_JSON = {
    "empty": b"",
    "blank": b" \n ",
    "open": b"{",
    "open string": b'{"prompt": "a',
    "array": b"[]",
    "number": b"7",
    "null": b"null",
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "1e999": b'{"prompt": "a", "temperature": 1e999}',
    "5,000 digits": b'{"prompt": "a", "seed": ' + b"9" * 5_000 + b"}",
    "-5,000 digits": b'{"prompt": "a", "max_tokens": -' + b"9" * 5_000 + b"}",
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "lone low surrogate": b'{"prompt": "a\\udc00b"}',
    "raw surrogate": b'{"prompt": "\xed\xa0\x80"}',
    "not utf-8": b'{"prompt": "\xff\xfe"}',
    "utf-16": '{"prompt": "a"}'.encode("utf-16"),
    "bom": b'\xef\xbb\xbf{"prompt": "a"',
    "raw NUL": b'{"prompt": "a\x00b"}',
    "trailing": b'{"prompt": "a"} x',
    "comma": b'{"prompt": "a",}',
    "single quotes": b"{'prompt': 'a'}",
    "deep arrays": b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "deep objects": b'{"messages": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
    "noise": random.Random(7).randbytes(400),
    "multipart": b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na\r\n--x--',
}
WRONG_VALUES: list[Any] = [
    -1,
    2**31,
    2**63,
    2**64,
    -(2**63) - 1,
    1e308,
    -0.5,
    "7",
    "",
    "\x00",
    True,
    [],
    [[]],
    {},
    {"a": {"b": [None]}},
    ["x"] * 3,
    [None],
    "x" * 5_000,
]
FIELDS = [
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "logprobs",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "bad_words",
    "prompt_logprobs",
    "stream",
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "priority",
    "timeout",
    "cache_salt",
    "structured_outputs",
    "allowed_token_ids",
    "min_tokens",
    "model",
    "messages",
    "prompt",
    "tools",
    "tool_choice",
    "chat_template",
    "chat_template_kwargs",
    "input",
    "dimensions",
    "tokens",
    "echo",
]
BOMBS: dict[str, dict[str, Any]] = {
    "deep schema": {"guided_json": '{"items":' * 400 + "{}" + "}" * 400},
    "wide schema": {
        "guided_json": {"type": "object", "properties": {f"p{i}": {} for i in range(9_000)}}
    },
    "large enum": {"guided_json": {"enum": [f"value {i}" for i in range(20_000)]}},
    "remote ref": {"guided_json": {"$ref": "http://169.254.169.254/latest/meta-data"}},
    "file ref": {"guided_json": {"$ref": "file:///etc/passwd"}},
    "endless ref": {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "lost ref": {"guided_json": {"$ref": "#/nowhere"}},
    "nested regex": {"guided_regex": "((((a*)*)*)*)*b"},
    "counted regex": {"guided_regex": "(a{1000}){1000}"},
    "huge count": {"guided_regex": "a{1000000000}"},
    "look-ahead": {"guided_regex": "(?=a)b"},
    "open regex": {"guided_regex": "(((("},
    "long regex": {"guided_regex": "a|" * 5_000},
    "bad grammar": {"guided_grammar": "start: undefined_rule"},
    "left recursion": {"guided_grammar": 'start: start "a"'},
    "long grammar": {"guided_grammar": "start: " + '"a" | ' * 20_000},
    "many choices": {"guided_choice": ["x"] * 5_000},
    "NUL choice": {"guided_choice": ["\x00", ""]},
    "schema of schemas": {"guided_json": {"anyOf": [{"anyOf": [{"anyOf": [{}] * 40}] * 40}] * 2}},
    "wrong schema": {"guided_json": {"type": "no such type"}},
    "huge maxLength": {"guided_json": {"type": "string", "maxLength": 10**12}},
    "huge minItems": {"guided_json": {"type": "array", "minItems": 10**9}},
}
TOO_MUCH: dict[str, dict[str, Any]] = {
    "n": {"n": 10**9},
    "logprobs": {"logprobs": 10**9},
    "prompt_logprobs": {"prompt_logprobs": 10**9},
    "prompts": {"prompt": ["a"] * 10_000},
    "token ids": {"prompt": [10**9]},
    "negative ids": {"prompt": [-1, -2]},
    "stops": {"stop": ["a"] * 100_000},
    "long stop": {"stop": "a" * 100_000},
    "biases": {"logit_bias": {str(i): 1.0 for i in range(100_000)}},
    "foreign bias": {"logit_bias": {"999999": 1.0}},
    "bad words": {"bad_words": ["a"] * 100_000},
    "messages": {"messages": [{"role": "user", "content": "a"}] * 20_000},
    "template": {"chat_template": "{% for i in range(10**9) %}{{ i }}{% endfor %}"},
    "template values": {"chat_template_kwargs": {f"k{i}": i for i in range(1_000)}},
    "reserved value": {"chat_template_kwargs": {"messages": []}},
    "image": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}],
            }
        ]
    },
    "long prompt": {"prompt": "a " * 300_000},
    "dimensions": {"dimensions": 10**9},
    "keys": {f"key {i}": i for i in range(50_000)},
}
TEN_MEGABYTES = json.dumps(PLAIN | {"prompt": "a" * (10 << 20)}).encode()


def cases(count: int) -> Iterator[Bad]:
    """The first `count` of an endless mix; each round has other values for other fields."""
    rng = random.Random(0)
    fixed = [
        Bad(f"json: {name}", path, body)
        for name, body in BROKEN_JSON.items()
        for path in ("/v1/completions", "/v1/chat/completions")
    ]
    for named in (BOMBS, TOO_MUCH):
        for name, fields in named.items():
            path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
            fixed.append(Bad(name, path, json.dumps(PATHS[path] | fields).encode()))
    fixed.append(Bad("10 MB", "/v1/completions", TEN_MEGABYTES))
    pairs = list(itertools.product(PATHS, FIELDS, range(len(WRONG_VALUES))))
    rng.shuffle(pairs)
    wrong = (
        Bad(
            f"{path} {field}={WRONG_VALUES[i]!r:.40}",
            path,
            json.dumps(PATHS[path] | {field: WRONG_VALUES[i]}).encode(),
        )
        for path, field, i in pairs
    )
    yield from itertools.islice(itertools.chain(fixed, wrong), count)
