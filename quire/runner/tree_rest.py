"""What is left of a step's trees of drafts: the drafts that were right, in their rightful slots.

A draft that was right may lie in another place than its position's. Its keys and values move there,
its row gets what was drawn, and whoever drafts from hidden states sees the step as if these drafts
had been fed alone, as a chain. Nothing of the others is left but bytes that the next step writes
over. Pages are published by positions that count, after this (`kv/manager.py`). On a CPU the draw
is at hand, and the chain ends with what was right. Elsewhere nobody waits for it (`tree_walk.py`):
the chain is as deep as its tree, and as of any chain, what was wrong is at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.memory.pool import PagePool
from quire.runner.gather import StepShape
from quire.runner.pending import Draw, PendingStep
from quire.runner.rows import RequestRows
from quire.runner.states import StepStates
from quire.runner.tree_walk import chain_of, walk
from quire.step import Work


@dataclass(frozen=True, slots=True)
class TreeRest:
    """A step in which every tree is a chain."""

    works: tuple[Work, ...]
    tokens: Tensor  # [tokens] int64, which of the step's these are
    samples: Tensor  # the same of its samples

    def shape(self, rows: RequestRows) -> StepShape:
        return StepShape(self.works, rows.max_rows)

    def of(self, states: StepStates) -> StepStates:
        every = None if states.every is None else states.every[self.tokens]
        streams = tuple(stream[self.tokens] for stream in states.streams)
        return StepStates(streams, every, states.sampled[self.samples])


def settle(
    pending: PendingStep,
    sent: Mapping[str, Tensor],
    rows: RequestRows,
    pool: PagePool,
    page_size: int,
) -> TreeRest:
    """Waits for the draw where the step's upload brought nothing to walk by."""
    if "trees" in sent:
        assert pending.draw is not None and pending.draw.drafts is not None
        return _settle_unseen(pending.works, pending.draw, sent, rows, pool, page_size)
    return _settle_seen(pending, rows, pool, page_size)


def _settle_unseen(
    works: tuple[Work, ...],
    draw: Draw,
    sent: Mapping[str, Tensor],
    rows: RequestRows,
    pool: PagePool,
    page_size: int,
) -> TreeRest:
    assert draw.drafts is not None
    walked = walk(works, sent, draw.output.tokens, draw.drafts, rows, page_size)
    pool.move(walked.sources, walked.targets)
    return TreeRest(tuple(map(chain_of, works)), walked.tokens, walked.samples)


def _settle_seen(
    pending: PendingStep, rows: RequestRows, pool: PagePool, page_size: int
) -> TreeRest:
    runs = {run.work: run for run in pending.runs()}
    works: list[Work] = []
    tokens: list[int] = []
    samples: list[int] = []
    moves: list[tuple[int, int, int]] = []  # (row, from place, to place)
    begin = first = 0  # of the work's tokens and samples
    for index, work in enumerate(pending.works):
        nodes = list(range(work.num_tokens))
        if work.parents:
            run = runs[index]
            nodes = [sample - first for sample in run.samples]
            at = slice(work.start + 1, work.start + 1 + len(run.tokens))
            rows.tokens[work.row, at] = torch.tensor(run.tokens, dtype=torch.int32)
            moves += _moves(work, nodes)
        num_samples = 1 + work.num_drafts if work.sample else 0
        drawn = nodes[-num_samples:] if num_samples else []
        samples += [first + node - work.num_tokens + num_samples for node in drawn]
        works.append(_chain(work, len(nodes)))
        tokens += [begin + node for node in nodes]
        begin, first = begin + work.num_tokens, first + num_samples
    if moves:
        at_rows, *places = torch.tensor(moves).T
        pool.move(*(_slots(rows, at_rows, place, page_size) for place in places))
    return TreeRest(tuple(works), torch.tensor(tokens), torch.tensor(samples))


def _moves(work: Work, nodes: list[int]) -> list[tuple[int, int, int]]:
    return [
        (work.row, work.start + node, work.start + depth)
        for depth, node in enumerate(nodes)
        if node != depth
    ]


def _chain(work: Work, num_nodes: int) -> Work:
    """The same with a chain of this many tokens for a tree."""
    if not work.parents:
        return work
    return work._replace(num_tokens=num_nodes, num_drafts=num_nodes - 1, drafts=(), parents=())


def _slots(rows: RequestRows, at: Tensor, places: Tensor, page_size: int) -> Tensor:
    """[groups, places]"""
    pages = rows.page_tables[:, at, places // page_size].long()
    return pages * page_size + places % page_size
