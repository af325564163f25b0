"""Ranks on CPUs whose decode steps replay what stands in for graphs. Run as a module it is the
process of such a rank.

A capture computes the step once, a replay computes it again, into the same tensors. A size named in
`FAILS` has no room on that rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.engine.rank_worker import main
from quire.engine.seat import OtherSeat
from quire.runner.gather import decode_batches
from quire.runner.graphs import Decoded, Graph, GraphCache, GraphMemory, Made
from quire.runner.joint_graphs import JointMemory
from quire.runner.runner import ModelRunner
from quire.runner.trees import Nodes

FAILS = "QUIRE_TEST_FAILS"  # a rank has no room for graphs of so many tokens: "2,0" of two ranks


class EagerGraph:
    def __init__(self, step: Callable[[], Decoded], made: Decoded) -> None:
        self._step, self._made = step, made

    def replay(self) -> None:
        for place, value in zip(self._made[:2], self._step()[:2], strict=True):
            place.copy_(value)


class EagerMemory(GraphMemory):
    def __init__(self, fails_at: int) -> None:
        self.tell, self._fails_at = None, fails_at
        self._made: Any = None

    def rehearse(self, first: Callable[[], object], key: object) -> None:
        self._made = first()

    def record(self, step: Callable[[], Made]) -> tuple[Graph, Made]:
        made: Any = self._made
        if len(made.logits) == self._fails_at:
            raise torch.OutOfMemoryError("played")
        return EagerGraph(step, made), made  # type: ignore[arg-type]


class Launched:
    """`dist.comm.Graphed`."""

    def launch(self, replay: Callable[[], object]) -> None:
        replay()


def decoded(
    runner: ModelRunner,
    row_ids: Tensor,
    positions: Tensor,
    max_context: int,
    shares_prefix: bool,
    nodes: Nodes | None = None,
) -> Decoded:
    """`runner.captured.decoded`, with contexts as a CPU wants them."""
    assert nodes is None and int(positions.max()) < max_context
    lens = positions.numpy().astype(np.int32) + 1
    ctx = runner.planned(
        decode_batches(runner.rows, row_ids, positions, runner.spec.page_size, lens)
    )
    hidden = runner.model.forward(ctx)
    return Decoded(runner.model.logits(hidden), hidden)


def with_graphs(runner: ModelRunner, rank: int) -> ModelRunner:
    fails_at = int(os.environ.get(FAILS, "0,0").split(",")[rank])
    ranks, rows = replace(runner.model.ranks, graphed=Launched()), runner.rows
    memory = JointMemory(EagerMemory(fails_at), ranks, runner.model.device)
    sizes = rows.max_rows, rows.max_len, rows.max_rows
    runner.graphs = GraphCache(partial(decoded, runner), *sizes, memory)
    return runner


def graphed(seat: Callable[..., ModelRunner], rank: int) -> Callable[..., ModelRunner]:
    """A seat's way to its runner."""
    return lambda *args: with_graphs(seat(*args), rank)


if __name__ == "__main__":
    OtherSeat.runner = graphed(OtherSeat.runner, 1)  # type: ignore[method-assign]
    sys.exit(main())
