"""What is done for one caller does not depend on what others asked: counted, not timed.

A clock would have to be believed; work can be compared exactly. Of the cache of answers that is
every statement its database runs, every search of an index, and every request the engine gets; of
the engine every step, and every token it computes or finds.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.server.fakes import Bench
from tests.server.judged import ask, make
from tests.server.test_embedder import ONE, OTHER, cache_of, pooled
from tests.tiny_folder import write_tiny_folder

BOBS = (ONE, OTHER, ONE, "Tell me a story", ONE.lower())


async def work_for_bob(bench: Bench, mode: str, alice: tuple[str, ...]) -> list[Any]:
    """All that is done for bob's requests, after alice's."""
    cache = cache_of(bench)
    await cache.similar.embedder.learn()
    for text in alice:
        await ask(bench, text, answer_cache=mode)
    statements: list[str] = []
    database = cache.entries.database
    await database.in_thread(
        lambda: database._connection.set_trace_callback(lambda text: statements.append(text))
    )
    done: list[Any] = []
    for text in BOBS:
        before = (cache.similar.num_lookups, cache.similar.embedder.num_read)
        num_sent = len(bench.link.submitted)
        statements.clear()
        reply = await ask(bench, text, "bob", answer_cache=mode)
        sent = [(r.tokens.tolist(), r.params, len(r.hint)) for r in bench.link.submitted[num_sent:]]
        counts = (
            cache.similar.num_lookups - before[0],
            cache.similar.embedder.num_read - before[1],
        )
        plain = [re.sub(r"X'[0-9A-Fa-f]*'|\d+", "?", text) for text in statements]
        done.append((reply.headers["x-quire-cache"], sent, counts, plain))
    await database.in_thread(lambda: database._connection.set_trace_callback(None))
    return done


@pytest.mark.parametrize("mode", ["exact", "draft", "answer"])
def test_the_cache_of_answers_does_the_same_for_bob(tmp_path: Path, mode: str) -> None:
    """Red when alice's entries are read, searched or counted on the way to bob's answer."""
    found = []
    for number, alice in enumerate((("Name a colour.",), BOBS)):
        bench = make(tmp_path / str(number), "answer", api_keys=("alice", "bob"))
        bench.link.pool = pooled
        found.append(asyncio.run(work_for_bob(bench, mode, alice)))
        assert bench.server.shelf is not None
        bench.server.shelf.close()
    assert found[0] == found[1]
    outcomes = [one[0].split(";")[0] for one in found[0]]
    assert outcomes[0] == "miss" and outcomes[2] == "exact"  # bob's own are found
    assert all(one[3] for one in found[0]), "no statement was seen: what is compared?"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_tiny_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)
    options = {"device": "cpu", "load_format": "dummy", "seed": 0, "page_size": 16}
    drafts = {"method": "suffix", "adaptive": False}  # else their number follows the clock
    return LLM(str(folder), speculative_config=drafts, **options)  # type: ignore[arg-type]


def engine_work(llm: LLM, salt: str, prompts: list[list[int]]) -> dict[str, int]:
    """What the engine does for requests under a salt, one behind another."""
    names = ("num_steps", "num_fed_tokens", "prefix_query_tokens", "prefix_hit_tokens")
    names += ("num_drafted_tokens", "num_accepted_tokens", "num_recomputed_tokens", "pages_copied")
    before = llm.stats()
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for ids in prompts:
        llm.generate({"prompt_token_ids": ids, "cache_salt": salt}, params, use_tqdm=False)
    after = llm.stats()
    return {name: getattr(after, name) - getattr(before, name) for name in names}


def test_the_engine_does_the_same_for_bob(llm: LLM) -> None:
    """Red when a prefix or a guess crosses from one salt to another."""
    prompts = [[7, *range(20, 90)], [7, *range(20, 60), 9], [7, *range(20, 90)]]
    alone = engine_work(llm, "bob", prompts)
    engine_work(llm, "alice", [[5, *range(100, 160)]])
    engine_work(llm, "alice", prompts)
    assert engine_work(llm, "carol", prompts) == alone
    assert alone["prefix_hit_tokens"] > 0 and alone["num_drafted_tokens"] > 0  # of its own
    assert engine_work(llm, "bob", prompts) != alone  # the same caller again finds its pages
