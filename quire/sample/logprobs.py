"""Log-probabilities of the unmodified distribution: chosen token, its rank, and the top n.

Ties are reported lowest id first, by ranking on integers that hold value and id together, so the
lists do not depend on the batch or on the device's selection algorithm. A row with a NaN logit has
NaN log-probabilities. Prompt log-probabilities run the head a few tokens at a time, since a prompt
times a vocabulary of floats is more than most machines have to spare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quire.sample.inputs import SampledLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# The same columns, one row for each prompt token, `chosen` being the token that follows it.
PromptLogprobs = SampledLogprobs


def log_softmax(logits: Tensor) -> Tensor:
    """[S, V] any float -> [S, V] f32, always a new tensor: later edits of logits do not reach it."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def gather_logprobs(logprobs: Tensor, tokens: Tensor, num: int) -> SampledLogprobs:
    """[S, V] f32, [S] -> the `num` best of each row, and where its token stands among all."""
    chosen = logprobs.gather(1, tokens[:, None])  # [S, 1]
    rank = (logprobs > chosen).sum(dim=1) + 1
    top_tokens = _top_tokens(logprobs, min(num, logprobs.shape[1]))  # [S, K]
    return SampledLogprobs(
        chosen=chosen.squeeze(1),
        chosen_rank=rank,
        top_tokens=top_tokens,
        top_values=logprobs.gather(1, top_tokens),
    )


def prompt_logprobs(
    hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], num: int, chunk: int
) -> PromptLogprobs:
    """hidden [T, H], targets [T] -> log-probabilities of targets[t] under head(hidden)[t].

    At most `chunk` rows of the vocabulary exist at once (as logits, f32 log-probabilities and,
    for num > 0, 64-bit ranking keys).
    """
    assert chunk >= 1, f"got chunk={chunk}, want at least 1"
    parts = [
        gather_logprobs(log_softmax(head(rows)), wanted, num)
        for rows, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return PromptLogprobs(
        chosen=torch.cat([part.chosen for part in parts]),
        chosen_rank=torch.cat([part.chosen_rank for part in parts]),
        top_tokens=torch.cat([part.top_tokens for part in parts]),
        top_values=torch.cat([part.top_values for part in parts]),
    )


def _top_tokens(values: Tensor, num: int) -> Tensor:
    """[S, V] f32 -> [S, num] ids, best first, ties by lowest id."""
    if num == 0:
        return torch.empty(values.shape[0], 0, dtype=torch.int64, device=values.device)
    bits = values.contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # signed integers in the order of the floats
    keys = ordered.long() << 32
    keys += torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    return values.shape[1] - 1 - (keys.topk(num, dim=-1).values & 0xFFFFFFFF)
