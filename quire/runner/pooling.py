"""Pools: the results of requests that do not generate, computed from the hidden states of steps.

"last" takes the state of the prompt's last token, "classify" the model's head over it. "mean" adds
up states in float32 over however many chunks the prompt is read in; a request that was preempted
begins again at position 0, and so does its sum. The prefix cache is no help to a mean: cached
positions have no hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.runner.gather import StepShape
from quire.runner.rows import POOLING, RequestRows


class PooledPart(NamedTuple):
    """A finished embedding, or scores of labels; still on the device."""

    work: int
    embedding: Tensor  # [hidden] or [labels] f32


class Pools:
    def __init__(
        self, rows: RequestRows, classify: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """`classify` is the model's head, [samples, hidden] -> [samples, labels]."""
        self.rows, self._classify = rows, classify
        self._sums: dict[int, Tensor] = {}  # row -> [hidden] f32 over the positions seen so far

    def take(self, shape: StepShape, hidden: Tensor) -> list[PooledPart]:
        """Fold in a step's hidden states; returns what is complete."""
        done: list[PooledPart] = []
        for work in np.flatnonzero(self.rows.needs[shape.rows] & POOLING).tolist():
            row, stop = int(shape.rows[work]), int(shape.query_ends[work])
            states = hidden[stop - int(shape.query_lens[work]) : stop]  # [tokens, hidden]
            info = self.rows.info[row]
            assert info is not None
            is_whole = int(shape.context_lens[work]) == info.num_prompt
            if info.params.pooling == "mean":
                if int(shape.starts[work]) == 0:
                    self._sums[row] = torch.zeros_like(states[0], dtype=torch.float32)
                self._sums[row] += states.float().sum(dim=0)
                if is_whole:
                    done.append(PooledPart(work, self._sums.pop(row) / info.num_prompt))
            elif is_whole and info.params.pooling == "classify":
                assert self._classify is not None, "a request for a head that was not handed over"
                done.append(PooledPart(work, self._classify(states[-1:])[0].float()))
            elif is_whole:
                done.append(PooledPart(work, states[-1].to(torch.float32, copy=True)))
        return done
