"""Steps in the forms that a graph can capture: everything derives from what the step uploaded.

Host numbers are bounds that the graph is keyed by. `graphs.py`, `prompt_graphs.py` and
`mixed_graphs.py` decide which steps take which form, and capture and replay them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from quire.attn.backend import prompt_planner
from quire.forward import ForwardContext, Tail, Taps
from quire.nn.linear import Adapted
from quire.runner.gather import decode_batches, fed_batches
from quire.runner.graphs import Decoded
from quire.runner.mixed_graphs import Queries
from quire.runner.prompt_graphs import Inputs
from quire.runner.trees import Nodes

if TYPE_CHECKING:
    from quire.runner.runner import ModelRunner


def decoded(
    runner: ModelRunner,
    row_ids: Tensor,
    positions: Tensor,
    max_context: int,
    shares_prefix: bool,
    nodes: Nodes | None = None,
    adapted: Adapted | None = None,
) -> Decoded:
    """Of a step of few tokens, each a sequence that ends with it."""
    bound = np.full(row_ids.shape[0], max_context, dtype=np.int32)
    size = runner.spec.page_size
    batches = decode_batches(runner.rows, row_ids, positions, size, bound, shares_prefix, nodes)
    ctx = replace(runner.planned(batches, max_context), adapted=adapted)
    hidden = runner.model.forward(ctx)
    return Decoded(runner.model.logits(hidden), hidden, ctx.taps.taken() if ctx.taps else ())


def prompt_logits(runner: ModelRunner, sent: Inputs, max_context: int) -> Tensor:
    """Of a padded prompt."""
    rows, size = runner.rows, runner.spec.page_size
    bound = np.full(2, max_context, dtype=np.int32)
    batches = fed_batches(rows, sent, size, bound, bound)
    planner = prompt_planner(runner.backend)
    plans = tuple(
        planner.plan_prompt(batch, spec, sent["tiles"])
        for batch, spec in zip(batches, runner.group_specs, strict=True)
    )

    def planned() -> object:
        group = runner.pool.group_of(runner.model.layers[-1])
        last = (sent["sample_rows"], sent["sample_positions"] - 1)
        batch = decode_batches(rows, *last, size, bound[:1])[group]
        return runner.backend.plan(batch, runner.group_specs[group], max_context)

    ctx = ForwardContext(batches[0], runner.backend, plans, runner.pool)
    return runner.model.logits(runner.model.forward(ctx, Tail(sent["sample_index"], planned)))


def mixed_queries(runner: ModelRunner, sent: Inputs, num_singles: int) -> Queries:
    """Of a padded step of prompts and decodes, up to its last layer's attention."""
    lens = np.zeros(len(sent["rows"]), dtype=np.int32)  # unread: tiles are data
    batches = fed_batches(runner.rows, sent, runner.spec.page_size, lens, lens)
    planner = prompt_planner(runner.backend)
    plans = tuple(
        planner.plan_mixed(batch, spec, sent["mixed_tiles"], num_singles)
        for batch, spec in zip(batches, runner.group_specs, strict=True)
    )
    # Streams that are tapped on the way are in the graph's memory, as the queries are.
    taps = Taps(runner.taps) if runner.taps else None
    ctx = ForwardContext(batches[0], runner.backend, plans, runner.pool, taps)
    return Queries(ctx, *runner.model.queries(ctx))
