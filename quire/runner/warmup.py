"""Warm-up: the largest step the scheduler may plan, through the same execute() as every step."""

from __future__ import annotations

import torch

from quire.attn.backend import AttentionBackend, AttnSpec
from quire.kv.groups import layer_groups
from quire.memory.pool import PagePool
from quire.models.decoder import Decoder
from quire.params import SamplingParams
from quire.request import RequestId
from quire.runner.rows import RequestRows
from quire.runner.runner import ModelRunner
from quire.step import Admission, PageWrite, StepPlan, Work


def largest_step(
    model: Decoder,
    backend: AttentionBackend,
    heads: AttnSpec,
    rows: RequestRows,
    num_tokens: int,
) -> int:
    """Feed a full budget of tokens, every row sampling, on a pool just big enough.

    Returns the bytes of that pool, which are not the step's own.
    """
    num_rows = min(rows.max_rows, num_tokens)
    each = min(num_tokens // num_rows, rows.max_len)
    pages_each = -(-each // heads.page_size)
    groups = layer_groups(model.spec.windows, model.spec.num_layers)
    num_pages = len(groups) * num_rows * pages_each + 1
    pool = PagePool(backend, heads, groups, num_pages, model.dtype, model.device)
    runner = ModelRunner(model, backend, heads, pool, rows, use_graphs=False)
    params = SamplingParams(top_p=0.9, seed=0)
    admissions, works, writes = [], [], []
    for row in range(num_rows):
        admissions.append(Admission(RequestId(row), row, [0] * each, each, params, row, ()))
        works.append(Work(RequestId(row), row, 0, each, True))
        for group in range(len(groups)):
            first = 1 + (group * num_rows + row) * pages_each
            writes += [PageWrite(row, i, first + i, group) for i in range(pages_each)]
    plan = StepPlan(tuple(works), tuple(admissions), tuple(writes))
    runner.execute(plan).result()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    rows.page_tables.zero_()  # its page ids were those of the small pool
    return pool.data.nbytes
