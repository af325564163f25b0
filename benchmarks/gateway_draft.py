"""Near-repeats with and without `answer_cache: draft`: the same tokens, and how much sooner.

Each variant is asked twice, in turn first and second, with an empty prefix cache: once without the
cache of answers, once after the cache has learned the answer to the text that it varies.
"""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.e2e.harness import Served

DOCUMENT = """The harbour office opens at seven in the morning and closes at six in the evening.
Visitors park behind the old warehouse and walk along the quay to the second gate. Every boat that
stays longer than one night needs a permit, which costs twelve euros and is paid in cash. Dogs are
welcome on the pier but not in the office. In case of a storm all boats must leave the outer basin
before noon. The telephone number of the harbour master is written on the door of the office."""

CODE = """def total(prices, tax):
    result = 0.0
    for price in prices:
        if price < 0:
            raise ValueError("a price is negative")
        result += price
    return result * (1 + tax)


def average(prices):
    if not prices:
        raise ValueError("there are no prices")
    return sum(prices) / len(prices)


def cheapest(prices, count):
    return sorted(prices)[:count]"""

REPEAT = "Repeat the following text word for word, but {}:\n\n" + DOCUMENT
RENAME = "Write this Python code again, but {}:\n\n```python\n" + CODE + "\n```"
LETTER = "Write a short letter to {} that thanks for a book about the sea."


class Family(NamedTuple):
    """Variants of one request; the kind says what differs."""

    kind: str
    base: str
    variants: Sequence[str]


FAMILIES = (
    Family("another name", LETTER.format("Anna"), [LETTER.format(n) for n in ("Peter", "Maria")]),
    Family(
        "another name",
        "Explain in five sentences what the capital of France is known for.",
        [f"Explain in five sentences what the capital of {c} is known for." for c in ("Italy",)],
    ),
    Family(
        "a typo",
        "What are the main differences between a violin and a cello?",
        [
            "What are the main diferences between a violin and a cello?",
            "What are the main differences between a violin and a cello",
            "what are the main differences between a violin and a cello?",
        ],
    ),
    Family(
        "a typo",
        "How do I boil an egg so that the yolk stays soft?",
        [
            "How do I boil an egg so that the yolk stay soft?",
            "How do i boil an egg so that the yolk stays soft?",
        ],
    ),
    Family(
        "an edit of a document",
        REPEAT.format("write 'ten euros' instead of 'twelve euros'"),
        [
            REPEAT.format("write 'nine euros' instead of 'twelve euros'"),
            REPEAT.format("write 'Cats' instead of 'Dogs'"),
        ],
    ),
    Family(
        "an edit of code",
        RENAME.format("call the first function total_price"),
        [
            RENAME.format("call the first function sum_of_prices"),
            RENAME.format("call the last function lowest"),
        ],
    ),
    Family(
        "another question",
        "What is a good recipe for a soup of pumpkins?",
        ["What is a good way to clean a window?", "Why is the sky blue in the morning?"],
    ),
)


class Asked(NamedTuple):
    seconds: float
    tokens: list[int]
    head: str
    accepted: int


def ask(served: Served, text: str, mode: str, num_tokens: int, salt: str) -> Asked:
    """Answers that other salts had are not known to a suffix tree."""
    served.post("/admin/flush_cache", {})
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "answer_cache": mode,
        "return_token_ids": True,
        "cache_salt": salt,
        **({"num_speculative_tokens": 0} if mode == "off" else {}),
    }
    request = urllib.request.Request(
        f"{served.url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    begun = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as answer:
        found = json.loads(answer.read())
        head = answer.headers.get("x-quire-cache", "")
    seconds = time.perf_counter() - begun
    details = found["usage"].get("completion_tokens_details") or {}
    accepted = int(details.get("accepted_prediction_tokens") or 0)
    return Asked(seconds, found["choices"][0]["token_ids"], head, accepted)


def similarity(head: str) -> float:
    for part in head.split(";"):
        name, _, value = part.strip().partition("=")
        if name == "similarity":
            return float(value)
    return 0.0


def near_repeats(served: Served, rounds: int, num_tokens: int) -> dict[str, Any]:
    times: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    told: dict[tuple[str, str], tuple[float, float]] = {}
    differing = 0
    for turn in range(rounds):
        for family in FAMILIES:
            for variant in family.variants:
                served.call("DELETE", "/v1/answer_cache", None)
                salt = str(uuid.uuid4())
                ask(served, family.base, "draft", num_tokens, salt)
                time.sleep(0.5)  # its embedding is made behind it
                modes = ("off", "draft") if turn % 2 else ("draft", "off")
                salts = {"draft": salt, "off": "plain"}
                found = {m: ask(served, variant, m, num_tokens, salts[m]) for m in modes}
                plain, drafted = found["off"], found["draft"]
                differing += plain.tokens != drafted.tokens
                key = family.kind, variant
                times[key].append((plain.seconds, drafted.seconds))
                told[key] = similarity(drafted.head), drafted.accepted / len(plain.tokens)
    kinds: dict[str, Any] = {}
    for kind in dict.fromkeys(family.kind for family in FAMILIES):
        keys = [key for key in times if key[0] == kind]
        gains = [statistics.median(a / b for a, b in times[key]) for key in keys]
        kinds[kind] = {
            "variants": len(keys),
            "similarity": [round(told[key][0], 2) for key in keys],
            "accepted_share": [round(told[key][1], 2) for key in keys],
            "times_as_fast": [round(gain, 2) for gain in gains],
            "times_as_fast_mean": round(statistics.geometric_mean(gains), 2),
        }
    return {"rounds": rounds, "tokens_each": num_tokens, "differing": differing, "kinds": kinds}
