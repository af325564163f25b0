"""Warm-up: steps of the sizes to expect, through the same execute() as every step."""

from __future__ import annotations

import torch

from quire.attn.backend import AttentionBackend
from quire.kv.groups import layer_groups
from quire.kv.spec import CacheSpec
from quire.memory.pool import PagePool
from quire.models.decoder import Decoder, heads_of
from quire.params import SamplingParams
from quire.request import RequestId
from quire.runner.captured import decoded
from quire.runner.graphs import SHORTEST_CONTEXT
from quire.runner.rows import RequestRows
from quire.runner.runner import ModelRunner
from quire.runner.stage_runner import LaterStageRunner
from quire.step import Admission, PageWrite, StepPlan, Work

SHORT_PROMPT = 32  # tokens
LAST_PART = 128  # the same, of a long prompt
SOME = 8  # sequences: their products use other tiles than a single sequence
MANY = 32  # ... and their contexts are merged by other programs
ALL_MERGED, MANY_MERGED = 16_384, 2_048  # contexts from which on these have no other variants
GREEDY = SamplingParams(temperature=0.0)


def largest_step(
    model: Decoder,
    backend: AttentionBackend,
    cache: CacheSpec,
    rows: RequestRows,
    num_tokens: int,
) -> int:
    """Feed a full budget of tokens, every row sampling, on a pool just big enough.

    Returns the bytes of that pool, which are not the step's own.
    """
    num_rows, each = _largest(rows, num_tokens)
    params = SamplingParams(top_p=0.9, seed=0)
    plan, num_pages = _step(model, cache.page_size, num_rows, each, params)
    runner = _runner(model, backend, cache, rows, num_pages)
    runner.execute(plan).result()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    rows.page_tables.zero_()  # its page ids were those of the small pool
    return runner.pool.data.nbytes


def compile_ahead(
    model: Decoder,
    backend: AttentionBackend,
    cache: CacheSpec,
    rows: RequestRows,
    num_tokens: int,
) -> None:
    """Compile the kernels of the largest step, of a first prompt and of decodes side by side."""
    from quire.kernels.rehearsal import rehearsal

    size = cache.page_size
    steps = (
        _step(model, size, *_largest(rows, num_tokens), SamplingParams(top_p=0.9, seed=0)),
        _step(model, size, 1, min(SHORT_PROMPT, rows.max_len), SamplingParams(temperature=0.0)),
    )
    runner = _runner(model, backend, cache, rows, max(num_pages for _, num_pages in steps))
    with torch.inference_mode(), torch.cuda.device(model.device), rehearsal():
        for plan, _ in steps:
            runner.execute(plan)
        for plan in long_steps(rows.max_rows, rows.max_len, num_tokens):
            runner.execute(plan)
        sizes = {(size, SHORTEST_CONTEXT) for size in (1, SOME)}
        sizes |= {(num, context) for num in (1, MANY) for context in contexts_to_meet(num)}
        for size, bound in sorted(sizes if model.stage.is_first else ()):
            fed = torch.zeros(min(size, rows.max_rows), dtype=torch.int32, device=model.device)
            decoded(runner, fed, fed, min(bound, rows.max_len), shares_prefix=False)
    rows.page_tables.zero_()


def contexts_to_meet(num_seqs: int) -> list[int]:
    """Contexts that reach all variants of the kernel that merges the splits of a context: it has
    one for each power of two of splits, up to 32, or up to 4 for many sequences.

    >>> contexts_to_meet(MANY)
    [1024, 2048]
    """
    most = MANY_MERGED if num_seqs >= MANY else ALL_MERGED
    return [SHORTEST_CONTEXT << k for k in range(1, (most // SHORTEST_CONTEXT).bit_length())]


def long_steps(max_rows: int, max_len: int, num_tokens: int) -> list[StepPlan]:
    """Last parts of prompts, one and many at a time, with contexts of these lengths. In a rehearsal
    only: their pages are nobody's."""
    plans = []
    for num_rows, part in ((1, LAST_PART), (min(MANY, max_rows), SHORT_PROMPT)):
        each = min(num_tokens // num_rows, part)
        for context in dict.fromkeys(min(one, max_len) for one in contexts_to_meet(num_rows)):
            num = min(each, context)
            admissions = tuple(
                Admission(RequestId(row), row, (0,), context, GREEDY, row, ())
                for row in range(num_rows)
            )
            works = tuple(
                Work(RequestId(row), row, context - num, num, True) for row in range(num_rows)
            )
            plans.append(StepPlan(works, admissions))
    return plans


def _largest(rows: RequestRows, num_tokens: int) -> tuple[int, int]:
    """(rows, tokens of each row) that fill a budget of tokens."""
    num_rows = min(rows.max_rows, num_tokens)
    return num_rows, min(num_tokens // num_rows, rows.max_len)


def _step(
    model: Decoder, page_size: int, num_rows: int, each: int, params: SamplingParams
) -> tuple[StepPlan, int]:
    """New requests of `each` tokens, and the number of pages that they need."""
    pages_each = -(-each // page_size)
    groups = layer_groups(model.spec.windows, model.spec.num_layers)
    admissions, works, writes = [], [], []
    for row in range(num_rows):
        admissions.append(Admission(RequestId(row), row, [0] * each, each, params, row, ()))
        works.append(Work(RequestId(row), row, 0, each, True))
        for group in range(len(groups)):
            first = 1 + (group * num_rows + row) * pages_each
            writes += [PageWrite(row, i, first + i, group) for i in range(pages_each)]
    plan = StepPlan(tuple(works), tuple(admissions), tuple(writes))
    return plan, len(groups) * num_rows * pages_each + 1


def _runner(
    model: Decoder, backend: AttentionBackend, cache: CacheSpec, rows: RequestRows, num_pages: int
) -> ModelRunner:
    heads = heads_of(model.spec, cache.page_size)
    pool = PagePool(backend, heads, cache, num_pages, model.device)
    kind = ModelRunner if model.stage.is_first else LaterStageRunner
    return kind(model, backend, heads, pool, rows, use_graphs=False)
