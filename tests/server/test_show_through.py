"""Tokens that go to the client while the stream's reader sleeps: the same bytes, fewer wake-ups."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server import sse
from quire.server.generation import Generation
from quire.server.link import Tap
from quire.server.outlet import Outlet
from quire.step import TokenEvent
from tests.server.asgi import Call, call
from tests.server.fakes import Bench

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES, OLLAMA = "/v1/messages", "/v1/responses", "/api/chat"
SAID = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, dict[str, Any]] = {
    PLAIN: {"prompt": "Hi", "stream": True, "max_tokens": 500},
    CHAT: {"messages": SAID, "stream": True, "max_tokens": 500},
    MESSAGES: {"messages": SAID, "stream": True, "max_tokens": 500, "model": "tiny"},
    RESPONSES: {"input": "Hi", "stream": True, "max_output_tokens": 500},
    OLLAMA: {"messages": SAID, "model": "tiny", "options": {"num_predict": 500}},
}
ANSWER = 'Ünïcode: 日本語 🙂 "quoted" \\ back\tslash\x7f and <b>tags</b>\nend.'
THOUGHT = "<think>Let me see.</think>It is wet."
CALLED = 'Well. <tool_call>\n{"name": "look", "arguments": {"at": "日 \\"x\\""}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": (PLAIN, ANSWER, {}),
    "plain usage": (PLAIN, ANSWER, {"stream_options": {"include_usage": True}}),
    "plain counts": (PLAIN, ANSWER, {"stream_options": {"continuous_usage_stats": True}}),
    "plain logprobs": (PLAIN, ANSWER, {"logprobs": 2}),
    "plain ids": (PLAIN, ANSWER, {"return_token_ids": True}),
    "plain echo": (PLAIN, ANSWER, {"echo": True}),
    "plain stop": (PLAIN, ANSWER, {"stop": ["tags"]}),
    "plain several": (PLAIN, ANSWER, {"n": 3, "temperature": 1.0, "seed": 1}),
    "plain prompts": (PLAIN, ANSWER, {"prompt": ["Hi", "Ho", "Well"]}),
    "chat": (CHAT, ANSWER, {}),
    "chat usage": (CHAT, ANSWER, {"stream_options": {"include_usage": True}}),
    "chat counts": (CHAT, ANSWER, {"stream_options": {"continuous_usage_stats": True}}),
    "chat logprobs": (CHAT, ANSWER, {"logprobs": True, "top_logprobs": 2}),
    "chat ids": (CHAT, ANSWER, {"return_token_ids": True}),
    "chat stop": (CHAT, ANSWER, {"stop": ["tags"]}),
    "chat thought": (CHAT, THOUGHT, {}),
    "chat thought hidden": (CHAT, THOUGHT, {"include_reasoning": False}),
    "chat tools": (CHAT, CALLED, {"tools": [TOOL]}),
    "messages": (MESSAGES, ANSWER, {}),
    "messages thought": (MESSAGES, THOUGHT, {}),
    "responses": (RESPONSES, ANSWER, {}),
    "responses thought": (RESPONSES, THOUGHT, {}),
    "ollama": (OLLAMA, ANSWER, {}),
}


def streamed(case: str, burst: int) -> Call:
    path, answer, fields = CASES[case]

    async def work() -> Call:
        bench = Bench(reasoning_parser="qwen3" if "thought" in case else None)
        bench.link.answer, bench.link.burst = answer, burst
        return await call(bench.app, "POST", path, ASKED[path] | fields, x_request_id="one")

    return asyncio.run(work())


def settled(made: Call) -> bytes:
    """Its body without what differs from one request to the next: clocks, and ids of calls."""
    body = re.sub(rb'"(created|created_at|completed_at)":[\d.]+', b'"\\1":0', made.body)
    body = re.sub(rb'"created_at":"[^"]*"', b'"created_at":""', body)
    body = re.sub(rb'"(total|load|prompt_eval|eval)_duration":\d+', b'"\\1_duration":0', body)
    body = re.sub(rb'"(\w+)_[0-9a-f]{16,}"', b'"\\1_x"', body)
    body = re.sub(rb'"call_[0-9a-f]+"', b'"call_x"', body)
    return re.sub(rb'"timings":\{[^}]*\}', b'"timings":{}', body)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case not in ("plain several", "plain prompts")]
)
def test_bytes_do_not_depend_on_who_writes_them(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when what is passed on differs in a byte from what the reader would have written."""
    passed_on = streamed(case, burst=1)
    with monkeypatch.context() as changed:
        changed.setattr(Outlet, "is_open", False)
        read = streamed(case, burst=1)
    assert passed_on.status == 200 and passed_on.num_writes > 8
    assert settled(passed_on) == settled(read)
    assert settled(streamed(case, burst=7)) == settled(read)


def texts(made: Call) -> dict[int, str]:
    """By choice; each must have ended once, with nothing behind it."""
    found: dict[int, str] = {}
    ended: set[int] = set()
    assert made.body.endswith(sse.DONE) and made.body.count(sse.DONE) == 1
    for line in made.body.split(b"\n\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                index = choice["index"]
                assert index not in ended
                found[index] = found.get(index, "") + choice["text"]
                if choice["finish_reason"] is not None:
                    ended.add(index)
    assert ended == set(found)
    return found


@pytest.mark.parametrize("case", ["plain several", "plain prompts"])
def test_several_answers_reach_the_client_whole(case: str) -> None:
    """Red when siblings that share a tap, or prompts that share a client, lose a token. Their order
    is the engine's."""
    for burst in (1, 5, 1_000):
        assert texts(streamed(case, burst)) == dict.fromkeys(range(3), ANSWER)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.integers(0, 63))
def test_prepared_chunks_are_the_whole_object_encoded(text: str, index: int) -> None:
    """Red when a character is escaped otherwise in a prepared chunk than in a whole object."""

    def chunk(content: str) -> dict[str, Any]:
        delta = {"index": index, "delta": {"content": content}, "finish_reason": None}
        return {"id": "ü␟".replace("␟", "-"), "created": 5, "choices": [delta], "usage": None}

    made = sse.TextChunk(chunk(sse.HOLE))(text)
    assert made == b"data: " + msgspec.json.encode(chunk(text)) + b"\n\n"
    assert json.loads(made[6:]) == chunk(text)


@pytest.mark.parametrize("half", ["\ud83d", "a\udc00b"])
def test_half_a_surrogate_is_refused_by_both_encoders(half: str) -> None:
    """Red when a prepared chunk would send what is no UTF-8. Detokenized text never has one."""
    shape = {"text": sse.HOLE}
    for encode in (sse.TextChunk(shape), lambda text: sse.data({"text": text})):
        with pytest.raises(UnicodeEncodeError):
            encode(half)


def test_the_reader_sleeps_while_tokens_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when every token wakes the task of its stream again."""
    num_taken = 0
    take = Tap.take

    async def counted(self: Tap) -> list[TokenEvent]:
        nonlocal num_taken
        num_taken += 1
        return await take(self)

    monkeypatch.setattr(Tap, "take", counted)
    for case in ("plain", "chat", "chat logprobs", "chat tools", "messages", "responses", "ollama"):
        num_taken = 0
        made = streamed(case, burst=1)
        assert made.num_writes > 20 and num_taken <= 3, case
    num_taken = 0
    assert streamed("plain prompts", burst=1).num_writes > 60 and num_taken <= 9
    for path in (PLAIN, CHAT, MESSAGES, RESPONSES, OLLAMA):  # whole answers
        num_taken, bench = 0, Bench()
        bench.link.answer = ANSWER
        body = {"max_tokens": 500} | ASKED[path] | {"stream": False}
        assert bench.post(path, body).status_code == 200
        assert num_taken <= 2, path


@pytest.mark.parametrize("case", ["plain", "chat", "plain prompts"])
def test_a_client_that_stalls_gets_the_rest_in_one_write(case: str) -> None:
    """Red when bytes are lost, doubled or out of order around a write that had to wait, or when
    nobody could tell that it waits."""
    path, answer, fields = CASES[case]

    class Stalling(Call):
        """Takes nothing after its sixth part, until it is told to."""

        async def _send(self, message: Any) -> None:
            await super()._send(message)
            if self.num_writes == 6:
                self.can_write.clear()

    async def work() -> Call:
        bench = Bench()
        bench.link.answer = answer
        made = Stalling(bench.app, "POST", path, {"x-request-id": "one"})
        made.send_body(ASKED[path] | fields)
        while made.num_writes < 6:
            await asyncio.sleep(0)
        for _ in range(300):  # turns of the loop: the engine is done meanwhile
            await asyncio.sleep(0)
        (request,) = bench.server.watchman._requests.values()
        assert request.sending_since is not None
        num_before = made.num_writes
        made.can_write.set()
        await made.end()
        assert made.num_writes <= num_before + (5 if case != "plain prompts" else 9)
        assert request.sending_since is None
        return made

    made = asyncio.run(work())
    if case == "plain prompts":
        assert texts(made) == dict.fromkeys(range(3), ANSWER)
    else:
        assert settled(made) == settled(streamed(case, burst=1))


def test_a_stop_string_ends_a_stream_once() -> None:
    """Red when a stop found while the reader sleeps is told twice, never, or not to the engine."""
    made = streamed("plain stop", burst=1)
    finishes = re.findall(rb'"finish_reason":"(\w+)"', made.body)
    assert finishes == [b"stop"] and made.body.endswith(sse.DONE)


def test_what_fails_while_passing_on_ends_its_own_stream_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when a bug in one stream's text ends the link, or leaves its client waiting."""
    fold = Generation._fold

    def broken(self: Generation, events: list[TokenEvent]) -> Any:
        if self.http.id == "bad" and self.num_output > 5:
            raise LookupError("a bug")
        return fold(self, events)

    monkeypatch.setattr(Generation, "_fold", broken)

    async def work() -> tuple[Call, Call]:
        bench = Bench()
        bench.link.answer = ANSWER
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        calls = []
        for name in ("bad", "good"):
            made = Call(bench.app, "POST", PLAIN, {"x-request-id": name})
            made.send_body(ASKED[PLAIN])
            calls.append(made)
        bad, good = [await one.end() for one in calls]
        assert bench.server.admission.num_open == 0
        return bad, good

    bad, good = asyncio.run(work())
    assert b"generation_failed" in bad.body and sse.DONE not in bad.body
    assert good.body.endswith(sse.DONE)
