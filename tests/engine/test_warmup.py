"""Warm-up measures and then vanishes: the engine that serves must not see a trace of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quire.kernels.merge_splits import MANY_TILES
from quire.kernels.paged_tile import default_config
from quire.params import SamplingParams
from quire.request import Request
from quire.runner.warmup import MANY, contexts_to_meet, largest_step, long_steps
from tests.hf import greedy, tiny_engine, tiny_model


def test_warm_up_leaves_no_page_ids_behind() -> None:
    """Red when rows still name pages of the warm-up's pool: the real one may have fewer.

    Backends read a row's table past its own pages as padding, so a stale id is an index error (or
    someone else's memory) as soon as a short and a long request decode in one group.
    """
    model = tiny_model("llama-gqa")
    page_bytes = 2 * 3 * 4 * 2 * 16 * 4  # keys and values, layers, page, kv heads, dim, f32
    engine = tiny_engine(model, max_model_len=48, kv_cache_memory=20 * page_bytes)
    runner = engine.runner
    assert runner.pool.num_pages == 20
    largest_step(runner.model, runner.backend, runner.pool.cache, runner.rows, num_tokens=8 * 32)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    requests = [Request.new(i, [7 + i] * n, params) for i, n in enumerate((20, 9, 2))]
    for request in requests:
        engine.core.add(request)
    while engine.core.has_work:
        engine.core.step()
    for request in requests:
        prompt = request.tokens[: request.num_prompt].tolist()
        assert request.output == greedy(model, prompt, 6)


def test_every_number_of_splits_is_met_before_a_request_comes() -> None:
    """Red when a context is merged by a kernel that was not compiled at start: `merge_splits` has a
    variant for each power of two of splits, up to 32, and up to 4 for many sequences."""
    splits = default_config(128, torch.bfloat16).splits

    def variants(contexts: Iterable[int], most: int) -> set[int]:
        counts = {splits.count(context) for context in contexts}
        return {min(most, 1 << (count - 1).bit_length()) for count in counts if count > 1}

    assert MANY == MANY_TILES
    for num_seqs, most in ((1, 32), (MANY - 1, 32), (MANY, 4)):
        met = variants(contexts_to_meet(num_seqs), most)
        assert met == variants(range(1, 140_000, 7), most)
    for longest in (300, 900, 5000, 140_000):
        works = [work for plan in long_steps(64, longest, 4096) for work in plan.works]
        alone = [plan.works[0] for plan in long_steps(64, longest, 4096) if len(plan.works) == 1]
        reached = variants((work.start + work.num_tokens for work in alone), 32)
        assert reached == variants(range(1, longest + 1), 32)
        assert all(work.start >= 0 and work.sample for work in works)
    assert all(plan.num_tokens <= 256 for plan in long_steps(64, 5000, 256))


def test_long_steps_can_be_executed() -> None:
    engine = tiny_engine(tiny_model("llama-gqa"), max_model_len=48)
    rows = engine.runner.rows
    for plan in long_steps(rows.max_rows, rows.max_len, 256):
        tokens = engine.runner.execute(plan).result().sampled
        assert len(tokens) == len(plan.works) and all(len(some) == 1 for some in tokens)
