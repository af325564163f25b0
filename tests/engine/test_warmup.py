"""Warm-up measures and then vanishes: the engine that serves must not see a trace of it."""

from __future__ import annotations

import torch

from quire.kernels.paged_tile import default_config
from quire.params import SamplingParams
from quire.request import Request
from quire.runner.warmup import contexts_to_meet, largest_step, long_steps
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
    variant for each power of two of splits, up to 32."""
    splits = default_config(128, torch.bfloat16).splits

    def variants(contexts: range | list[int]) -> set[int]:
        counts = {splits.count(context) for context in contexts}
        return {min(32, 1 << (count - 1).bit_length()) for count in counts if count > 1}

    for longest in (512, 1000, 5000, 32_832, 131_072):
        met = variants(contexts_to_meet(longest))
        assert met == variants(range(1, longest + 1, 7)) | variants([longest])
    for plan in long_steps(64, 32_832, 8192):
        assert sum(work.num_tokens for work in plan.works) <= 8192
        assert all(work.start >= 0 and work.sample for work in plan.works)
    ends = {
        work.start + work.num_tokens for plan in long_steps(64, 900, 256) for work in plan.works
    }
    assert ends == {512, 900}
