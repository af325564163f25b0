"""Similar requests by the model's embeddings: found, kept apart, and never trusted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from quire.answers.embed import REFERENCES, Scale
from quire.answers.features import SIZE
from quire.server.answer_cache import AnswerCache
from tests.answers.pairs import ADVERSARIAL
from tests.server.fakes import Bench, chat_tokenizer
from tests.server.judged import ask, how, link_of, make

HIDDEN = 48
TOPICS = {"boil": 1, "steam": 1, "poem": 2, "verses": 2}
ONE, OTHER, FAR = "When does water boil?", "Heat for steam?", "Compose verses"


def pooled(ids: list[int], seed: int = 0) -> list[float]:
    """A model for which words of one topic mean the same; all its vectors point the same way."""
    text = chat_tokenizer().decode(ids)
    topic = next((number for word, number in TOPICS.items() if word in text), 0)
    about = np.random.default_rng((topic or crc32(text.encode())) + seed)
    own = np.random.default_rng(crc32(text.encode()) + seed)
    return (20.0 + about.normal(size=HIDDEN) + 0.3 * own.normal(size=HIDDEN)).tolist()


def cache_of(bench: Bench) -> AnswerCache:
    assert bench.server.answers is not None
    return bench.server.answers


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = make(tmp_path, "answer", api_keys=("alice", "bob"))
    made.link.pool = pooled
    yield made
    assert made.server.shelf is not None
    made.server.shelf.close()


def test_questions_without_a_common_word_are_found(bench: Bench) -> None:
    """Red when an embedding is not asked for, not kept, or compared with another caller's."""

    async def work() -> None:
        await cache_of(bench).similar.embedder.learn()
        assert how(await ask(bench, ONE, answer_cache="draft")) == "miss"
        reply = await ask(bench, OTHER, answer_cache="draft")
        assert reply.headers["x-quire-cache"].startswith("draft; similarity=0.")
        assert reply.headers["x-quire-cache"].endswith("by=model")
        hinted = [r for r in bench.link.submitted if r.params.pooling is None][-1]
        assert chat_tokenizer().decode(list(hinted.hint)) == "Hello there."
        assert how(await ask(bench, FAR, answer_cache="draft")) == "miss"
        assert how(await ask(bench, OTHER, "bob", answer_cache="draft")) == "miss"
        # Nearly the same words need no embedding.
        count = cache_of(bench).similar.embedder.num_read
        again = await ask(bench, ONE.lower(), answer_cache="draft", max_tokens=20)
        assert "by=model" not in again.headers["x-quire-cache"]
        assert cache_of(bench).similar.embedder.num_read == count

    asyncio.run(work())


def test_words_have_to_do_where_there_are_no_embeddings(bench: Bench) -> None:
    """Red when a request fails, or waits, for want of an embedding."""

    async def work() -> None:
        embedder = cache_of(bench).similar.embedder
        await ask(bench, ONE, answer_cache="draft")  # nothing was learned yet
        assert embedder.num_read == 0
        assert how(await ask(bench, ONE + " Say", answer_cache="draft")) == "draft"
        await embedder.learn()
        bench.link.pool = None  # the engine fails to pool
        assert how(await ask(bench, OTHER, answer_cache="draft")) == "miss"
        assert how(await ask(bench, ONE + " Tell", answer_cache="draft")) == "draft"
        embedder.scale = None
        with pytest.raises(Exception, match="no embedding"):
            await embedder.learn()

    asyncio.run(work())


def test_embeddings_are_kept_under_their_makers_fingerprint(bench: Bench) -> None:
    """Red when a restart loses them, or compares those of two models."""

    async def work() -> None:
        cache = cache_of(bench)
        await cache.similar.embedder.learn()
        await ask(bench, ONE, answer_cache="draft")
        for seed, outcome in ((0, "draft"), (5, "miss")):
            bench.link.pool = lambda ids, seed=seed: pooled(ids, seed)  # type: ignore[misc]
            bench.server.answers = AnswerCache(bench.server, cache.entries, 0.05)
            await bench.server.answers.similar.embedder.learn()
            assert how(await ask(bench, OTHER, answer_cache="draft")) == outcome
            await cache.entries.database.call(
                lambda db: db.execute("DELETE FROM answers WHERE text = ?", (OTHER,))
            )
        rows = await cache.entries.database.call(
            lambda db: db.execute("SELECT count(*) FROM answer_vectors").fetchone()
        )
        assert rows[0] == 1  # those of entries that are gone went with them

    asyncio.run(work())


@pytest.mark.parametrize("change", ["system", "tools", "max_tokens"])
def test_a_meaning_is_not_a_key(bench: Bench, change: str) -> None:
    """Red when an answer is given to a request of another conversation, tools or settings."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    fields = {
        "system": {"messages": [{"role": "system", "content": "Be brief"},
                                {"role": "user", "content": OTHER}]},
        "tools": {"tools": [tool]},
        "max_tokens": {"max_tokens": 900},
    }[change]  # fmt: skip

    async def work() -> None:
        await cache_of(bench).similar.embedder.learn()
        await ask(bench, ONE, answer_cache="answer")
        assert how(await ask(bench, OTHER, answer_cache="answer", **fields)) == "draft"
        assert link_of(bench).num_probes == 0

    asyncio.run(work())


def test_an_embedder_for_which_all_is_one(bench: Bench) -> None:
    """Red when a cosine alone answers: here every pair has a similarity of 1."""

    async def work() -> None:
        embedder = cache_of(bench).similar.embedder
        await embedder.learn()
        vector = np.ones(SIZE, np.float32) / np.sqrt(np.float32(SIZE))

        async def same(text: str, asker: object, is_later: bool = False) -> object:
            return vector

        embedder.embed = same  # type: ignore[assignment, method-assign]
        for number, (one, other) in enumerate(ADVERSARIAL):
            bench.link.answer = f"The answer number {number}."
            await ask(bench, one, answer_cache="answer")
            bench.link.answer = f"Another answer, {number}."
            link_of(bench).gap = 0.01  # a near miss at every place
            assert how(await ask(bench, other, answer_cache="answer")) == "draft"
        assert link_of(bench).num_probes >= len(ADVERSARIAL)  # each was looked at

    asyncio.run(work())


def test_the_scale_makes_meanings_comparable() -> None:
    """Red when the common direction of all vectors drowns what tells them apart."""
    rows = [pooled(chat_tokenizer().encode(text)) for text in REFERENCES]
    scale = Scale.of(rows)
    one, other, far = (scale.embedding(pooled(chat_tokenizer().encode(t)))
                       for t in (ONE, OTHER, FAR))  # fmt: skip
    assert abs(np.linalg.norm(one) - 1.0) < 1e-5 and one.shape == (SIZE,)
    assert one @ other > 0.6 > 0.4 > one @ far
    assert Scale.of(rows).digest == scale.digest
