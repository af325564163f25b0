"""HomePages: of a plan and a step, what belongs to this rank, where each has requests of its own.

The scheduler numbers the pages of all ranks through (`kv/homes.py`); here they become places of our
own pool. Rows of other ranks have stale page tables, which nobody reads.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from quire.dist.homes import StepHomes
from quire.dist.ranks import Ranks
from quire.forward import Batch
from quire.runner.gather import StepShape
from quire.runner.upload import IntArray
from quire.step import StepPlan


class HomePages:
    def __init__(self, ranks: Ranks, num_pages: int) -> None:
        """`num_pages`: of each rank's pool, with its scratch page."""
        self.ranks, self._each = ranks, num_pages - 1

    def own_part(self, plan: StepPlan) -> StepPlan:
        """The same with edits of our pages alone, by their places in our pool."""
        before = self.ranks.rank * self._each
        own = range(before + 1, before + self._each + 1)
        return replace(
            plan,
            page_writes=tuple(
                write._replace(page=write.page - before)
                for write in plan.page_writes
                if write.page in own
            ),
            page_copies=tuple(
                copy._replace(source=copy.source - before, target=copy.target - before)
                for copy in plan.page_copies
                if copy.target in own
            ),
        )

    def of(self, shape: StepShape, homes: IntArray) -> HomeRows:
        """`homes`: of each of the step's works."""
        return HomeRows(self.ranks, shape, homes)


class HomeRows:
    """Of one step."""

    def __init__(self, ranks: Ranks, shape: StepShape, homes: IntArray) -> None:
        assert (homes[1:] >= homes[:-1]).all(), f"works of a home lie apart: {homes}"
        seqs = np.bincount(homes, minlength=ranks.size)
        of_tokens = np.bincount(np.repeat(homes, shape.query_lens), minlength=ranks.size)
        of_samples = np.bincount(homes[shape.sampled], minlength=ranks.size)
        first = int(seqs[: ranks.rank].sum())
        self._seqs = slice(first, first + int(seqs[ranks.rank]))
        self.tokens = StepHomes(tuple(of_tokens.tolist()), ranks.rank, ranks.comm)
        self.samples = StepHomes(tuple(of_samples.tolist()), ranks.rank, ranks.comm)

    def batch(self, batch: Batch) -> Batch:
        """Our sequences, of a batch of all."""
        return part_of(batch, self._seqs, self.tokens.own)

    def drawn(self, batch: Batch) -> Batch:
        """The same of a tail's batch, a sequence for each sample."""
        return part_of(batch, self.samples.own, self.samples.own)

    def places(self, sample_index: Tensor) -> Tensor:
        """Of our samples among our tokens."""
        return self.samples.take(sample_index).sub(self.tokens.own.start)


def part_of(batch: Batch, seqs: slice, tokens: slice) -> Batch:
    """Neighbouring sequences of a batch, which feed these tokens."""
    prompts = batch.host_prompt_lens
    return replace(
        batch,
        input_ids=_part(batch.input_ids, tokens),
        positions=_part(batch.positions, tokens),
        slots=_part(batch.slots, tokens),
        query_starts=batch.query_starts[seqs.start : seqs.stop + 1] - tokens.start,
        context_lens=_part(batch.context_lens, seqs),
        rows=_part(batch.rows, seqs),
        host_query_lens=batch.host_query_lens[seqs],
        host_context_lens=batch.host_context_lens[seqs],
        host_prompt_lens=None if prompts is None else prompts[seqs],
        paths=None if batch.paths is None else batch.paths[tokens],
    )


def _part(x: Tensor, own: slice) -> Tensor:
    """On a GPU where kernels find all they read: at a multiple of 16 bytes."""
    return x[own].clone() if x.is_cuda else x[own]
