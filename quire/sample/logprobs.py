"""Log-probabilities of the unmodified distribution: chosen token, its rank, and the top n.

Ties are reported lowest id first, so the lists depend neither on the batch nor on how a device
happens to select. A row with a NaN logit has NaN log-probabilities. Prompt log-probabilities run
the head on a few tokens at a time: a prompt times a vocabulary of floats is more than fits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.sample.inputs import SampledLogprobs
from quire.sample.ops import Best
from quire.sample.truncate import FAR, Limits, kept_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from quire.sample.gumbel import Floats, Ints

    BestOf = Callable[[Tensor, Tensor, int], Best]

# The same columns with one row for each prompt token; `chosen` is the token that follows it.
PromptLogprobs = SampledLogprobs


def log_softmax(logits: Tensor) -> Tensor:
    """[S, V] any float -> [S, V] f32, always a new tensor that later edits do not reach."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def best_of_rows(logprobs: Tensor, chosen: Tensor, num: int) -> Best:
    """`SampleOps.best` in numpy: on a CPU several times faster than torch's reductions."""
    rows = list(zip(logprobs.numpy(), chosen.numpy(), strict=True))
    ranks = torch.tensor([np.count_nonzero(row > value) + 1 for row, value in rows]).long()
    best = [_top_of_row(row, num) for row, _ in rows]
    return Best(ranks, torch.from_numpy(np.array(best, np.int64).reshape(len(rows), num)))


def gather_logprobs(
    logprobs: Tensor, tokens: Tensor, num: int, best: BestOf = best_of_rows
) -> SampledLogprobs:
    """[S, V] f32, [S] -> the `num` best of each row, and the rank of its token. `best` is the
    device's."""
    chosen = logprobs.gather(1, tokens[:, None])  # [S, 1]
    num = min(num, logprobs.shape[1])
    rank, top_tokens = best(logprobs, chosen, num)  # [S], [S, K]
    return SampledLogprobs(
        chosen=chosen.squeeze(1),
        chosen_rank=rank,
        top_tokens=top_tokens,
        top_values=logprobs.gather(1, top_tokens),
    )


def prompt_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: Callable[[Tensor], Tensor],
    num: int,
    chunk: int,
    best: BestOf = best_of_rows,
) -> PromptLogprobs:
    """hidden [T, H], targets [T] -> log-probabilities of targets[t] under head(hidden)[t].

    At most `chunk` rows of the vocabulary exist at once (as logits and f32 log-probabilities;
    on a GPU as 64-bit keys too).
    """
    assert chunk >= 1 and len(hidden) == len(targets) > 0, f"got {chunk=}, {len(targets)} targets"
    pieces = [slice(start, start + chunk) for start in range(0, len(targets), chunk)]
    parts = [gather_logprobs(log_softmax(head(hidden[i])), targets[i], num, best) for i in pieces]
    return PromptLogprobs(
        chosen=torch.cat([part.chosen for part in parts]),
        chosen_rank=torch.cat([part.chosen_rank for part in parts]),
        top_tokens=torch.cat([part.top_tokens for part in parts]),
        top_values=torch.cat([part.top_values for part in parts]),
    )


def top_by_keys(values: Tensor, num: int) -> Tensor:
    """[S, V] f32 -> [S, num] ids, best first: top-k of integers that hold value and id together."""
    last = values.shape[1] - 1
    bits = values.contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # signed integers in the order of the floats
    keys = ordered.long() << 32
    keys += torch.arange(last, -1, -1, device=values.device)
    return last - (keys.topk(num, dim=-1).values & 0xFFFFFFFF)


def _top_of_row(logprobs: Floats, num: int) -> Ints:
    if num == 0:
        return np.empty(0, np.int64)
    distance = np.fmin(-logprobs, FAR)  # -inf and NaN come last, still in the order of ids
    tokens = kept_tokens(distance, Limits.of(num, 1.0, 0.0, len(distance)))
    return tokens[np.argsort(distance[tokens], kind="stable")]
