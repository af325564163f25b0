"""Two thousand requests through one engine: nothing piles up, neither pages nor bytes."""

from __future__ import annotations

import gc
import os
import random
import resource
from pathlib import Path

import pytest

from quire.engine.build import Engine
from quire.kv.check import check
from quire.params import SamplingParams
from quire.request import Request
from tests.engine.tiny import random_llama
from tests.hf import tiny_engine

VOCAB = 64
NUM_REQUESTS = 2000
SETTLED = 500  # by now every cache that has a bound is full


def resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def small_engine() -> Engine:
    model = random_llama(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    engine = tiny_engine(model, max_model_len=40, max_num_seqs=16, page_size=4)
    page_bytes = engine.runner.pool.data.nbytes // engine.runner.pool.num_pages
    return tiny_engine(
        model, max_model_len=40, max_num_seqs=16, page_size=4, kv_cache_memory=60 * page_bytes
    )


def random_request(rng: random.Random, id: int, shared: list[int]) -> Request:
    prompt = shared[: rng.randint(0, 16)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
    params = SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        top_p=rng.choice([1.0, 0.8]),
        max_tokens=rng.randint(1, 12),
        logprobs=rng.choice([None, None, 3]),
        prompt_logprobs=rng.choice([None, None, None, 2]),
        repetition_penalty=rng.choice([1.0, 1.1]),
        logit_bias=rng.choice([None, {3: 1.0}]),
        bad_word_ids=rng.choice([(), ((4, 5), (6,))]),
        min_tokens=rng.choice([0, 1]),
    )
    salt = rng.choice(["", "", str(id)])  # clients may choose as many salts as they like
    return Request.new(id, prompt, params, eos_ids=[2], cache_salt=salt, seed=id, arrival=float(id))


@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
def test_nothing_piles_up(overlap: bool) -> None:
    """Red when finished, aborted or preempted requests leave pages, rows or memory behind."""
    engine, rng = small_engine(), random.Random(1)
    core, scheduler = engine.core, engine.core.scheduler
    core.lag = int(overlap)
    shared = [rng.randrange(VOCAB) for _ in range(16)]
    resident = 0
    finished: dict[int, int] = {}
    submitted = id = 0
    while submitted < NUM_REQUESTS or core.has_work:
        while submitted < NUM_REQUESTS and len(scheduler.waiting) < 4:
            family = []
            for _ in range(rng.choice([1, 1, 1, 3])):
                id += 1
                family.append(random_request(rng, id, shared))
            for child in family[1:]:  # copies share the prompt
                child.tokens = family[0].tokens[:]
                child.num_prompt, child.cache_salt = family[0].num_prompt, family[0].cache_salt
            family[0].children = family[1:]
            core.add(family[0])
            submitted += len(family)
        events = core.step()
        if rng.random() < 0.1:
            events = [*events, *core.abort(rng.randint(1, id))]
        for event in events:
            if event.finish:
                finished[event.request_id] = finished.get(event.request_id, 0) + 1
        if not resident and submitted >= SETTLED:
            gc.collect()
            resident = resident_bytes()
    gc.collect()
    growth = resident_bytes() - resident
    assert growth < 50 << 20, f"{growth >> 20} MB grew between request {SETTLED} and the last"
    assert finished == dict.fromkeys(range(1, id + 1), 1), "exactly one final event for everyone"
    stats = scheduler.stats()
    assert (stats.pages_live, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.num_finished == id >= NUM_REQUESTS
    assert stats.num_preempted > 0 and stats.prefix_hit_tokens > 0 and stats.pages_evicted > 0
    check(scheduler.kv)
    assert sorted(scheduler._free_rows) == list(range(16))
    assert not scheduler._parents and scheduler.waiting.num_tokens == 0
    assert not core._inflight
    scheduler.kv.flush()
    assert scheduler.stats().pages_empty == stats.pages_total
