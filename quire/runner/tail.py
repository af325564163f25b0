"""Tail: the tokens a step samples from, as a decode step of their own for the last layer.

What that layer computes after its keys and values are stored is read only where a token is drawn,
unless somebody came for hidden states. A row's bits do not depend on the batch, so nothing but time
tells whether the others were computed. `models/decoder.py` is where they are left out.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.forward import Batch
from quire.runner.gather import StepShape, decode_batches
from quire.runner.rows import RequestRows

# Rows that must go for the second plan and its few launches to be worth their time. Few rows more
# or less are free on a GPU, where the weights are what is read.
MIN_DROPPED = 64
MIN_DROPPED_ON_CPU = 8


def min_dropped(device: torch.device) -> int:
    return MIN_DROPPED_ON_CPU if device.type == "cpu" else MIN_DROPPED


def sampled_batch(
    rows: RequestRows, shape: StepShape, sent: dict[str, Tensor], step: Batch, group: int
) -> Batch:
    """One query for each token drawn in `step`, over its whole context, for one layer group; any
    group's `step` will do."""
    kept, prompts = shape.sampled, step.host_prompt_lens
    fed_at = sent["sample_positions"] - 1  # what is drawn comes after the last token fed
    lens = shape.context_lens[kept]
    batch = decode_batches(rows, sent["sample_rows"], fed_at, step.page_size, lens)[group]
    # Positions, not chunks, decide on the form of latent attention.
    return replace(batch, host_prompt_lens=None if prompts is None else prompts[kept])
