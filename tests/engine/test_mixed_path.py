"""The runner's path for steps of prompts and decodes, with a stand-in for captured graphs.

`EagerMixed` sees what a replay sees, the padded upload, and computes at once; the Triton kernels
run in the interpreter. Red when padding reaches a result or a page of somebody else's, when the
plan on the device leaves out a tile, or when an upload's place depends on who is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.interpreter  # noqa: F401  mends the interpreter for this NumPy
from quire.attn.triton import TritonAttention
from quire.kernels.paged_tile import Launch, PagedConfig
from quire.memory.pool import PagePool
from quire.params import SamplingParams
from quire.request import RequestId
from quire.runner import mixed_graphs
from quire.runner.captured import mixed_queries
from quire.runner.gather import StepShape
from quire.runner.mixed_graphs import STAGED, MixedSize, Queries
from quire.runner.prompt_graphs import Inputs
from quire.runner.rows import RequestRows
from quire.runner.runner import ModelRunner
from quire.step import Admission, PageWrite, StepPlan, Work
from tests.engine.test_prompt_path import seen_by_sampler
from tests.hf import tiny_engine, tiny_model

TILES = PagedConfig(16, 16, Launch(16, 4, 2), Launch(16, 4, 2))
MAX_LEN, MAX_ROWS = 32, 3
LENGTHS = (17, 2, 5)  # of prompts, in rows of their own; the last is read in two steps
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


class EagerMixed:
    def __init__(self, runner: ModelRunner, size: MixedSize) -> None:
        self.runner, self.size, self.num_replays = runner, size, 0

    def size_for(self, query_lens: Sequence[int], longest: int) -> MixedSize:
        return self.size

    def replay(self, sent: Inputs, size: MixedSize) -> Queries:
        self.num_replays += 1
        assert list(sent)[: len(STAGED)] == list(STAGED)
        assert len(sent["positions"]) == size.num_tokens and len(sent["rows"]) == size.num_seqs
        staged = {name: sent[name] for name in STAGED}
        return mixed_queries(self.runner, staged, size.num_singles)


def steps(page_size: int, num_groups: int) -> list[StepPlan]:
    """Two prompts; then they decode while a third is read, but for its last tokens; then all."""
    pages = -(-MAX_LEN // page_size)
    plans = []
    for rows, works in (
        ((0, 1), [(0, 0, 17), (1, 0, 2)]),
        ((2,), [(0, 17, 1), (1, 2, 1), (2, 0, 3)]),
        ((), [(0, 18, 1), (1, 3, 1), (2, 3, 2)]),
    ):
        admissions = [
            Admission(RequestId(row), row, [(5 * i + row) % 90 + 3 for i in range(LENGTHS[row])],
                      LENGTHS[row], PARAMS, row, ())
            for row in rows
        ]  # fmt: skip
        writes = [
            PageWrite(row, i, 1 + (group * MAX_ROWS + row) * pages + i, group)
            for group in range(num_groups)
            for row in rows
            for i in range(pages)
        ]
        planned = [
            Work(RequestId(row), row, start, num, start + num >= LENGTHS[row])
            for row, start, num in works
        ]
        plans.append(StepPlan(tuple(planned), tuple(admissions), tuple(writes)))
    return plans


def logits_of(runner: ModelRunner, size: MixedSize | None) -> list[Tensor]:
    """Of each step; the last two padded to `size` unless that is None."""
    seen = seen_by_sampler(runner)
    first, *others = steps(runner.spec.page_size, len(runner.pool.groups))
    runner.execute(first).result()
    if size is not None:
        runner.mixed_graphs = EagerMixed(runner, size)
    for plan in others:
        runner.execute(plan).result()
    assert size is None or runner.mixed_graphs.num_replays == 2
    return seen


def test_a_padded_step_says_what_the_plain_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 tokens a single one is left to pad the second step. gemma2 has windows, which make two
    layer groups, and soft caps."""
    monkeypatch.setattr(mixed_graphs, "MOST_PROMPTS", 2)  # fewer empty tiles to interpret
    plain = tiny_engine(tiny_model("gemma2")).runner
    model, heads, groups = plain.model, plain.spec, plain.pool.groups
    pages = -(-MAX_LEN // heads.page_size)
    found = []
    for backend, size in (
        (plain.backend, None),
        (TritonAttention(torch.float32, TILES), MixedSize(6, 3)),
    ):
        rows = RequestRows(MAX_ROWS, MAX_LEN, pages, model.device, len(groups))
        num_pages = 1 + len(groups) * MAX_ROWS * pages
        pool = PagePool(backend, heads, plain.pool.cache, num_pages, model.device)
        runner = ModelRunner(model, backend, heads, pool, rows, use_graphs=False)
        runner.min_dropped = 1  # rows, for the last layer to leave them out
        found.append(logits_of(runner, size))
    assert [len(logits) for logits in found[1]] == [2, 2, 3]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def test_uploads_lie_at_the_same_place_whoever_feeds() -> None:
    """Red when the size of an array that graphs read depends on more than the size of the step."""
    size = MixedSize(16, 8)
    backend = TritonAttention(torch.float32, TILES)
    spec = tiny_engine(tiny_model("llama-gqa")).runner.spec
    sizes = set()
    for lens in ([16], [1, 1, 14], [2, 5], [1, 1, 1, 1, 1, 1, 9], [3, 3, 3, 3, 4]):
        works = tuple(
            Work(RequestId(i), i, 7 * i, num, sample=i % 2 == 0) for i, num in enumerate(lens)
        )
        shape = StepShape(works, spare_row=MAX_ROWS, mixed_size=size)
        arrays = {
            "mixed_tiles": backend.mixed_tiles(shape.query_lens, shape.context_lens, 8, 6, spec)
        }
        shape.stage(arrays)
        sizes.add(tuple(arrays[name].size for name in STAGED))
        assert shape.num_tokens == 16
        assert np.array_equal(shape.query_lens[: len(lens)], lens)
        assert tuple(shape.context_lens[-2:]) == (0, 1) and not shape.query_lens[-2:].any()
    assert len(sizes) == 1
