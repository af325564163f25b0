"""The mode `answer`: whose answer is given to a similar question, and whose is not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.answers.bound import Seen
from tests.answers.held_out import HELD_OUT, OTHER_FORM
from tests.answers.pairs import ADVERSARIAL
from tests.server.fakes import Bench
from tests.server.judged import TOOL, ask, how, keys, link_of, make, observe, text_of


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = make(tmp_path, "answer", api_keys=("alice", "bob"))
    yield made
    assert made.server.shelf is not None
    made.server.shelf.close()


@pytest.mark.parametrize(("one", "other"), [*ADVERSARIAL, *HELD_OUT])
def test_a_different_question_gets_its_own_answer(bench: Bench, one: str, other: str) -> None:
    """Red when the answer to another question is given, however alike the two look and however
    little the model minds it."""
    link_of(bench).gap = 0.01

    async def work() -> None:
        first = await ask(bench, one, answer_cache="answer")
        (key,) = await keys(bench)
        await observe(bench, key, [Seen(1.0, True)] * 100)  # an entry that was always right so far
        bench.link.answer = "Quite another answer."
        second = await ask(bench, other, answer_cache="answer")
        assert text_of(first) == "Hello there." and text_of(second) == "Quite another answer."
        assert how(second) in ("draft", "miss")

    asyncio.run(work())


@pytest.mark.parametrize(("one", "other"), OTHER_FORM)
def test_the_same_question_gets_the_answer_it_had(bench: Bench, one: str, other: str) -> None:
    """Red when an entry that was always right is of use to nobody."""
    link_of(bench).gap = 0.01

    async def work() -> None:
        await ask(bench, one, answer_cache="answer")
        (key,) = await keys(bench)
        await observe(bench, key, [Seen(1.0, True)] * 100)
        bench.link.answer = "Quite another answer."
        reply = await ask(bench, other, answer_cache="answer")
        assert how(reply) == "answer" and text_of(reply) == "Hello there."

    asyncio.run(work())


def test_a_plain_prompt_has_no_other_form(bench: Bench) -> None:
    """Red when text to be gone on with is treated as a question: a final point changes it."""
    link_of(bench).gap = 0.01

    async def work() -> None:
        fields = {"path": "/v1/completions", "answer_cache": "answer", "max_tokens": 9}
        await ask(bench, "", prompt="Explain rain", **fields)
        (key,) = await keys(bench)
        await observe(bench, key, [Seen(1.0, True)] * 100)
        bench.link.answer = "Quite another answer."
        assert how(await ask(bench, "", prompt="Explain rain.", **fields)) == "draft"

    asyncio.run(work())


def test_an_answer_the_model_would_give_is_given(bench: Bench) -> None:
    """Red when a proof is not enough, or an answer is given without one."""

    async def work() -> None:
        one, other = "Explain photosynthesis.", "Please explain photosynthesis."
        await ask(bench, one, answer_cache="answer")
        count = len(bench.link.submitted)
        reply = await ask(bench, other, answer_cache="answer")
        assert how(reply) == "proved" and text_of(reply) == "Hello there."
        assert len(bench.link.submitted) == count + 1 and link_of(bench).num_probes == 1
        assert "similarity=" in reply.headers["x-quire-cache"]
        for fields in ({"tools": [TOOL]}, {"temperature": 1}, {"presence_penalty": 1}):
            assert how(await ask(bench, other, answer_cache="answer", **fields)) != "proved"

    asyncio.run(work())


def test_an_answer_is_given_once_its_bound_allows(bench: Bench) -> None:
    """Red when an entry without a record is trusted, or one with a good record never is."""

    async def work() -> None:
        one, other = "Explain photosynthesis.", "Please explain photosynthesis."
        await ask(bench, one, answer_cache="answer")
        (key,) = await keys(bench)
        bench.link.answer = "hello there."  # the same in other tokens
        link_of(bench).gap = 0.5
        first = await ask(bench, other, answer_cache="answer")
        assert how(first) == "draft"
        entries = bench.server.answers.entries  # type: ignore[union-attr]
        caller = bench.server.keys.caller({"authorization": "Bearer alice"})
        assert caller is not None
        entry = await entries.get(caller.salt, key)
        assert entry is not None and entry.seen == [Seen(0.5, True)]
        await observe(bench, key, [Seen(0.5, True)] * 60)
        again = "Could you explain photosynthesis."
        await entries.database.call(
            lambda db: db.execute("DELETE FROM answers WHERE key != ?", (key,))
        )
        reply = await ask(bench, again, answer_cache="answer")
        assert how(reply) == "answer" and text_of(reply) == "Hello there."
        assert "error<=0.0" in reply.headers["x-quire-cache"]
        await observe(bench, key, [Seen(0.5, False)] * 20)
        last = "Can you explain photosynthesis?"
        assert how(await ask(bench, last, answer_cache="answer")) == "draft"

    asyncio.run(work())


def test_a_different_frame_is_a_different_question(bench: Bench) -> None:
    """Red when what stood before the last message does not count."""

    async def work() -> None:
        def talk(before: str) -> list[dict[str, str]]:
            return [
                {"role": "user", "content": before},
                {"role": "assistant", "content": "Yes."},
                {"role": "user", "content": "And how do I do that?"},
            ]

        await ask(bench, "", answer_cache="answer", messages=talk("May I rename it?"))
        probes = link_of(bench).num_probes
        reply = await ask(bench, "", answer_cache="answer", messages=talk("May I delete it?"))
        assert how(reply) == "draft" and link_of(bench).num_probes == probes

    asyncio.run(work())
