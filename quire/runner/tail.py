"""Tail: the tokens a step samples from, as a decode step of their own for the last layer.

After the last layer has stored its keys and values, the rest of its work is read only where a token
is drawn, unless a request needs hidden states. A row's bits do not depend on the batch, so leaving
the other rows out changes nothing but time. `models/decoder.py` leaves them out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.forward import Batch, Tail
from quire.runner.gather import StepShape, decode_batches
from quire.runner.rows import RequestRows

if TYPE_CHECKING:
    from quire.runner.runner import ModelRunner

# Rows to leave out before the second plan and its few launches pay off. On a GPU a few rows more or
# less cost nothing, because the time goes into reading the weights.
MIN_DROPPED = 64
MIN_DROPPED_ON_CPU = 8


def min_dropped(device: torch.device) -> int:
    return MIN_DROPPED_ON_CPU if device.type == "cpu" else MIN_DROPPED


def sampled_batch(
    rows: RequestRows, shape: StepShape, sent: dict[str, Tensor], step: Batch, group: int
) -> Batch:
    """One query for each token drawn in `step`, over its whole context, for one layer group.

    `step` may be the batch of any group."""
    kept, prompts = shape.sampled, step.host_prompt_lens
    fed_at = sent["sample_positions"] - 1  # what is drawn comes after the last token fed
    lens = shape.sample_lens
    batch = decode_batches(rows, sent["sample_rows"], fed_at, step.page_size, lens)[group]
    # Positions, not chunks, decide on the form of latent attention.
    return replace(batch, host_prompt_lens=None if prompts is None else prompts[kept])


def tail_of(runner: ModelRunner, shape: StepShape, sent: dict[str, Tensor], step: Batch) -> Tail:
    """What to keep of `step` in the last layer."""

    def planned() -> object:
        group = runner.pool.group_of(runner.model.layers[-1])
        batch = sampled_batch(runner.rows, shape, sent, step, group)
        if own is not None:
            batch = own.drawn(batch)
        return runner.backend.plan(batch, runner.group_specs[group])

    index, own = sent["sample_index"], runner.home_rows(shape)
    if own is None:
        return Tail(index, planned)
    return Tail(index, planned, own.samples, own.places(index))
