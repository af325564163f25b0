"""The cache of answers in the server: what is given, what is a hint, and what nobody sees."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.answers.entries import Keeping
from quire.engine.commands import AdapterInfo
from tests.server.fakes import Bench, chat_tokenizer
from tests.server.judged import CHAT, GREEDY, TOOL, ask, how, keys, link_of, make, text_of


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = make(tmp_path, "answer", api_keys=("alice", "bob"))
    yield made
    assert made.server.shelf is not None
    made.server.shelf.close()


def test_the_same_again_is_not_made_again(bench: Bench) -> None:
    """Red when an answer under the same key differs in anything a client sees, or is made anew."""

    async def work() -> None:
        first = await ask(bench, "hi", answer_cache="exact", seed=1)
        count = len(bench.link.submitted)
        bench.link.answer = "Something else."
        second = await ask(bench, "hi", answer_cache="exact", seed=2)  # greedy: seeds say nothing
        assert (how(first), how(second)) == ("miss", "exact")
        assert len(bench.link.submitted) == count
        for name in ("choices", "usage"):
            assert first.json()[name] == second.json()[name]
        streamed = await ask(bench, "hi", answer_cache="exact", stream=True)
        assert how(streamed) == "exact" and "Hello there." in streamed.text
        warm = {"answer_cache": "exact", "temperature": 0.7}
        assert how(await ask(bench, "hi", **warm, seed=1)) == "miss"
        assert how(await ask(bench, "hi", **warm, seed=1)) == "exact"
        assert how(await ask(bench, "hi", **warm, seed=2)) == "miss"
        for _ in range(2):  # drawn anew every time, so given never
            assert how(await ask(bench, "hi", **warm)) == "miss"

    asyncio.run(work())


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 5},
        {"stop": ["there"]},
        {"tools": [TOOL]},
        {"temperature": 0.3, "seed": 1},
        {"logit_bias": {"5": 3}},
        {"reasoning_effort": "none"},
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]},
        {"messages": [{"role": "user", "content": "hi "}]},
        {"response_format": {"type": "json_object"}},
        {"min_tokens": 2},
        {"model": "default"},  # several models, or adapters, may be served under names
    ],
)
def test_whatever_changes_the_answer_changes_the_key(bench: Bench, change: dict[str, Any]) -> None:
    """Red when a field that may change the answer is not part of the key."""

    async def work() -> None:
        await ask(bench, "hi", answer_cache="exact")
        assert how(await ask(bench, "hi", **{"answer_cache": "exact", **change})) == "miss"

    asyncio.run(work())


def test_what_is_more_than_tokens_is_made(bench: Bench) -> None:
    async def work() -> None:
        for fields in ({"logprobs": True}, {"n": 2, "temperature": 1, "seed": 3}):
            for _ in range(2):
                assert how(await ask(bench, "hi", answer_cache="exact", **fields)) == ""

    asyncio.run(work())


def test_stop_strings_and_calls_come_back_as_they_were(bench: Bench) -> None:
    """Red when the end of an answer is told otherwise the second time."""

    async def work() -> None:
        for answer, fields in (
            ("One. Two. Three.", {"stop": ["Two"]}),
            ("x" * 100, {"max_tokens": 4}),
            ('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', {"tools": [TOOL]}),
        ):
            bench.link.answer = answer
            first = await ask(bench, answer, answer_cache="exact", **fields)
            second = await ask(bench, answer, answer_cache="exact", **fields)
            assert how(second) == "exact"
            a, b = first.json()["choices"][0], second.json()["choices"][0]
            for call in (
                *(a["message"].get("tool_calls") or ()),
                *(b["message"].get("tool_calls") or ()),
            ):
                call.pop("id")
            assert a == b

    asyncio.run(work())


def test_similar_answers_are_hints(bench: Bench) -> None:
    """Red when a hint is given as an answer, or the answer it helped is not the engine's own."""

    async def work() -> None:
        await ask(bench, "How do I sort a list in Python?", answer_cache="draft")
        bench.link.answer = "Quite another answer."
        reply = await ask(bench, "How can I sort a list in Python?", answer_cache="draft")
        assert how(reply) == "draft" and text_of(reply) == "Quite another answer."
        hint = bench.link.submitted[-1].hint
        assert "Hello there." in chat_tokenizer().decode(list(hint))
        assert how(await ask(bench, "Zzz", answer_cache="draft")) == "miss"
        assert bench.link.submitted[-1].hint == ()
        warm = await ask(bench, "How would I sort a list in Python?", temperature=1)
        assert how(warm) == "draft"  # also where nothing repeats; and unasked, where it is allowed

    asyncio.run(work())


def test_others_see_nothing(bench: Bench) -> None:
    """Red when a key gets another's answer, a hint of it, or a judgement of it."""

    async def work() -> None:
        texts = ("Name a colour.", "Why does rain fall?", "Sort these numbers quickly")
        for mode, text in zip(("exact", "draft", "answer"), texts, strict=True):
            await ask(bench, text, answer_cache=mode)
            assert how(await ask(bench, text, "bob", answer_cache=mode)) == "miss"
        bobs = [r for r in bench.link.submitted if r.tenant != bench.link.submitted[0].tenant]
        assert [request.hint for request in bobs] == [()] * 3
        assert link_of(bench).num_probes == 0

    asyncio.run(work())


def test_entries_are_bounded_and_outlive_the_process(tmp_path: Path) -> None:
    async def work() -> None:
        bench = make(tmp_path, "exact")
        assert bench.server.answers is not None and bench.server.shelf is not None
        bench.server.answers.entries.keeping = Keeping(3, 1 << 30, 1_000)
        for number in range(5):
            await ask(bench, f"question {number}")
            await ask(bench, "question 0")
        assert len(await keys(bench)) == 3
        assert how(await ask(bench, "question 0")) == "exact"  # used last
        assert how(await ask(bench, "question 1")) == "miss"
        bench.server.shelf.close()
        again = make(tmp_path, "exact")
        assert how(await ask(again, "question 0")) == "exact"
        again.server.answers.entries.keeping = Keeping(3, 1 << 30, -1)  # type: ignore[union-attr]
        assert how(await ask(again, "question 0")) == "miss"
        assert again.server.shelf is not None
        again.server.shelf.close()

    asyncio.run(work())


def test_answers_are_bounded_in_bytes(tmp_path: Path) -> None:
    """Red when a key may fill the disk with answers, or loses what it used last. Others' answers
    have a bound of their own."""

    async def work() -> None:
        bench = make(tmp_path, "exact", api_keys=("alice", "bob"))
        assert bench.server.answers is not None and bench.server.shelf is not None
        entries, database = bench.server.answers.entries, bench.server.shelf.database
        bench.link.answer = "ä" * 2_000  # 4,000 bytes, and more of its tokens
        await ask(bench, "question 0")
        caller = bench.server.keys.caller({"authorization": "Bearer alice"})
        assert caller is not None
        one = (await entries.summary(caller.salt))["bytes"]
        assert one is not None and one > 4_000 + 2_000
        entries.keeping = Keeping(100, 3 * one + 100, 1_000)
        await ask(bench, "question 0", "bob")
        for number in range(1, 5):
            await ask(bench, f"question {number}")
            await database.call(  # a second passes
                lambda db: db.execute("UPDATE answers SET used_at = used_at - 1")
            )
            assert how(await ask(bench, "question 0")) == "exact"
        held = await entries.summary(caller.salt)
        assert held["entries"] == 3 and held["bytes"] == 3 * one
        assert how(await ask(bench, "question 0", "bob")) == "exact"
        bench.link.answer = "ä" * 20_000
        await ask(bench, "one that is larger than all of them")
        assert (await entries.summary(caller.salt))["bytes"] == held["bytes"]
        assert how(await ask(bench, "question 0")) == "exact"
        bench.server.shelf.close()

    asyncio.run(work())


def test_another_model_has_other_answers(tmp_path: Path) -> None:
    """Red when other weights under the same name answer with what the former said."""

    async def work() -> None:
        bench = make(tmp_path, "draft")
        await ask(bench, "hi there")
        assert bench.server.card is not None and bench.server.shelf is not None
        bench.server.shelf.close()
        other = make(tmp_path, "draft")
        assert other.server.card is not None and other.server.shelf is not None
        other.server.card = type(other.server.card)(
            "gguf", "Q8_0", 1_000, other.server.card.modified, "cd" * 32
        )
        assert how(await ask(other, "hi there")) == "miss"
        other.server.shelf.close()

    asyncio.run(work())


def test_an_adapter_has_answers_of_its_own(bench: Bench) -> None:
    """Red when the base model answers for an adapter, or an adapter for the one before it."""

    async def work() -> None:
        asked = {"answer_cache": "exact", "model": "sql"}
        await ask(bench, "Explain rain.", answer_cache="exact")
        for digest in (b"first", b"second"):
            bench.link.adapters["sql"] = AdapterInfo("sql", "/sql", 8, 100, digest)
            assert how(await ask(bench, "Explain rain.", **asked)) == "miss"
            assert how(await ask(bench, "Explain rain.", **asked)) == "exact"
        asked["answer_cache"] = "answer"
        assert how(await ask(bench, "Please explain rain.", **asked)) == "proved"
        assert bench.link.submitted[-1].adapter_name == "sql"  # judged by the adapter

    asyncio.run(work())


def test_off_unless_asked(tmp_path: Path) -> None:
    """Red when answers are kept, or given, that nobody asked to be."""
    bench = Bench()
    assert bench.server.answers is None
    reply = bench.post(CHAT, {"messages": [{"role": "user", "content": "hi"}]})
    assert "x-quire-cache" not in reply.headers
    for mode, status in (("off", 200), ("exact", 400), ("nonsense", 400)):
        body = {"messages": [{"role": "user", "content": "hi"}], "answer_cache": mode}
        reply = bench.post(CHAT, body)
        assert reply.status_code == status
        if status == 400:
            assert reply.json()["error"]["param"] == "answer_cache"

    async def work() -> None:
        made = make(tmp_path, "draft")
        for _ in range(2):
            assert how(await ask(made, "hi", answer_cache="off")) == ""
        assert await keys(made) == []
        assert made.server.shelf is not None
        made.server.shelf.close()

    asyncio.run(work())


def test_a_prediction_is_a_hint(tmp_path: Path) -> None:
    """Red when OpenAI's Predicted Outputs do not reach the engine, or are dropped silently."""
    body = {"messages": [{"role": "user", "content": "hi"}], "prediction": {"type": "content"}}
    for content in ("Hello there.", [{"type": "text", "text": "Hello there."}]):
        bench = Bench()
        body["prediction"]["content"] = content  # type: ignore[index]
        assert "takes no hints" in bench.post(CHAT, body).headers["x-quire-warning"]
        engine = replace(bench.settings.engine, speculative_config={"method": "hint+suffix"})
        bench.server.settings = replace(bench.settings, engine=engine)
        assert bench.post(CHAT, body).status_code == 200
        hint = bench.link.submitted[-1].hint
        assert chat_tokenizer().decode(list(hint)) == "Hello there."
    body["prediction"] = {"type": "image", "content": ""}
    assert bench.post(CHAT, body).json()["error"]["param"] == "prediction.type"


def test_a_caller_counts_and_forgets_its_own(bench: Bench) -> None:
    async def work() -> None:
        await ask(bench, "hi", answer_cache="exact")
        await ask(bench, "hi", answer_cache="exact")
        await ask(bench, "hi", "bob", answer_cache="exact")
        async with bench.client() as client:
            mine = {"authorization": "Bearer alice"}
            found = (await client.get("/v1/answer_cache", headers=mine)).json()
            assert (found["entries"], found["hits"], found["mode"]) == (1, 1, "answer")
            (entry,) = found["data"]
            assert (entry["text"], entry["hits"]) == ("hi", 1)
            assert entry["created_at"] == found["oldest_at"] <= entry["used_at"]
            assert entry["tokens"] > 0 < found["bytes"]
            url = "/v1/answer_cache?limit=0"
            assert (await client.get(url, headers=mine)).status_code == 400
            assert (await client.delete("/v1/answer_cache", headers=mine)).json()["deleted"] == 1
        assert len(await keys(bench)) == 1
        assert how(await ask(bench, "hi", answer_cache="exact")) == "miss"

    asyncio.run(work())
    assert Bench().get("/v1/answer_cache").json()["mode"] == "off"


def test_every_way_in_is_cached(bench: Bench) -> None:
    """Red when one of the endpoints forgets the cache."""

    async def work() -> None:
        for path, body in (
            ("/v1/completions", {"prompt": "hi", "max_tokens": 9}),
            ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 9}),
            ("/v1/responses", {"input": "hi", "store": False}),
        ):
            body = {**body, **GREEDY, "answer_cache": "exact"}
            for wanted in ("miss", "exact"):
                reply = await bench.send(path, body, authorization="Bearer alice")
                assert reply.status_code == 200 and how(reply) == wanted
                await bench.server.answers.flush()  # type: ignore[union-attr]
        summary = bench.server.metrics.summary()["answer_cache"]
        assert summary == {"miss": 3, "exact": 3}

    asyncio.run(work())
