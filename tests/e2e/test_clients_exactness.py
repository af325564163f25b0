"""Streams are exact: joined, the pieces of any request are the answer it gets whole.

Random requests, greedy or seeded, with stop strings, several answers, echo, logprobs and
constraints, sent twice over raw HTTP so that every line of the stream is seen as it is.
"""

from __future__ import annotations

import json
import os
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.harness import Served

NUM_REQUESTS = int(os.environ.get("QUIRE_TEST_STREAMS", "100"))
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "日本",
    "😀",
    "naïve",
    "\n",
    "main()",
    "é",
]
STOPS = ["a", "e", "the", " f", "日本", "\n", "()", "qu", "nothing like it"]


def random_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 30)))
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 40)}
    if rng.random() < 0.3:
        body["temperature"] = 0
    else:
        body |= {"seed": rng.randrange(2**40), "temperature": rng.uniform(0.3, 2.0)}
        body["n"] = rng.choice([1, 1, 2, 3])
    if rng.random() < 0.4:
        body["stop"] = rng.sample(STOPS, rng.randint(1, 3))
        body["include_stop_str_in_output"] = rng.random() < 0.3
    for name, value in (
        ("min_tokens", 1),
        ("ignore_eos", True),
        ("skip_special_tokens", False),
        ("top_k", 20),
        ("repetition_penalty", 1.2),
        ("return_token_ids", True),
        ("structured_outputs", {"regex": "[a-zé ]{3,30}"}),
    ):
        if rng.random() < 0.2:
            body[name] = value
    if rng.random() < 0.5:
        body["messages"] = [{"role": "user", "content": text}]
        body["logprobs"] = rng.random() < 0.3
        return "/v1/chat/completions", body
    body["prompt"] = [text, "a"] if rng.random() < 0.3 else text
    body["echo"] = rng.random() < 0.3
    if rng.random() < 0.3:
        body["logprobs"] = 1
    return "/v1/completions", body


@dataclass
class Joined:
    """One choice put together from its chunks."""

    text: str = ""
    finishes: list[tuple[str, Any]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def take(self, choice: dict[str, Any]) -> None:
        assert not self.finishes, "nothing may follow a finish_reason"
        delta = choice.get("delta", choice)
        self.text += delta.get("content") or delta.get("text") or ""
        self.tokens += token_names(choice)
        self.token_ids += choice.get("token_ids", [])
        if choice["finish_reason"] is not None:
            self.finishes.append((choice["finish_reason"], choice["stop_reason"]))


def token_names(choice: dict[str, Any]) -> list[str]:
    found = choice.get("logprobs") or {}
    return found.get("tokens") or [entry["token"] for entry in found.get("content", [])]


def read_stream(served: Served, path: str, body: dict[str, Any]) -> list[str]:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(
        served.url + path,
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        events = answer.read().decode().split("\n\n")
    assert events.pop() == "", "the last event ends like the others"
    assert [event for event in events if not event.startswith("data: ")] == [], body
    return [event.removeprefix("data: ") for event in events]


def check(served: Served, number: int) -> str:
    """Send one random request both ways; the finish reason of its first answer."""
    path, body = random_request(random.Random(number))
    status, whole = served.post(path, body)
    assert status == 200, (body, whole)
    events = read_stream(served, path, body)
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    last = chunks.pop()
    assert last["choices"] == [] and all(chunk.get("usage") is None for chunk in chunks)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name], body
    joined = [Joined() for _ in whole["choices"]]
    for chunk in chunks:
        assert chunk["id"] == last["id"] and len(chunk["choices"]) == 1
        joined[chunk["choices"][0]["index"]].take(chunk["choices"][0])
    for one, choice in zip(joined, whole["choices"], strict=True):
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert one.text == text, body
        assert one.finishes == [(choice["finish_reason"], choice["stop_reason"])], body
        assert one.tokens == token_names(choice), body
        assert one.token_ids == choice.get("token_ids", []), body
    return str(whole["choices"][0]["finish_reason"])


def check_all(served: Served, count: int) -> None:
    with ThreadPoolExecutor(6) as pool:
        reasons = list(pool.map(lambda number: check(served, number), range(count)))
    assert {"stop", "length"} == set(reasons)
    served.wait_idle()


def test_pieces_joined_are_the_whole(served: Served) -> None:
    """Red when a delta is lost, doubled or cut elsewhere than in the whole answer."""
    check_all(served, NUM_REQUESTS)


def test_packed_weights_serve_the_same_way(served_packed: Served) -> None:
    """Red when a packed model's answer depends on who else is asking, or an embedding does."""
    check_all(served_packed, NUM_REQUESTS // 3)
    body = {"model": "tiny", "input": ["the quick brown fox", "x"]}
    (status, first), (_, again) = (served_packed.post("/v1/embeddings", body) for _ in range(2))
    assert status == 200 and first["data"] == again["data"] and len(first["data"]) == 2
    served_packed.wait_idle()
