"""GraphCache: CUDA graphs of steps of few tokens, captured when first needed and replayed after.

Every token is fed as a sequence that ends with it: a decode is one token of its row, a request that
has drafts verified is several neighbours of one row. A graph is keyed by how many tokens it is
padded to and by an upper bound on their context, so that a short batch does not launch the split-KV
programs of a long one. Inputs are two vectors, rows and positions; where drafts are trees also
their places and paths (`trees.py`), and graphs are keyed by the width of these. A graph reads them
at the address they had when it was captured; uploads always go there (`upload.py`), so a replay
need not copy them. The graph derives the batch from them and writes the logits buffer. All graphs
share one memory pool, because only one runs at a time. A size that ran out of memory is not
captured again: its steps run kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from quire.runner.trees import NO_TREE, Nodes

# Beyond 128: sizes at which the library's products are quick, in models of 8B and 14B on an H200.
# Some other sizes, such as 192, 320 or 448 rows, take longer than the next larger one here.
BATCH_SIZES = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128),
    *(144, 160, 176, 200, 216, 256, 272, 304, 336, 384, 432, 464, 512),
)
SHORTEST_CONTEXT = 512  # one split of the attention kernel: nothing to merge
USUAL = 2  # bounds of contexts that most requests stay below
MAX_KEYS = 1 << 23  # batch times context of the largest graph; beyond it steps run eagerly

# Threads that move pages (`memory/strip.py`) ask for events while this one captures.
CAPTURE_MODE = "thread_local"

Made = TypeVar("Made")


class Graph(Protocol):
    def replay(self) -> None: ...


class Capturing(Protocol):
    """How graphs come about, and where what they compute lies."""

    def capture(
        self, first: Callable[[], object], step: Callable[[], Made], key: object
    ) -> tuple[Graph, Made]:
        """`first` runs before, and compiles and sizes what `step` needs. Raises OutOfMemoryError
        where the graph has no room."""
        ...

    @property
    def alone(self) -> GraphMemory:
        """For graphs of this process, whoever else has a part in others."""
        ...


class GraphMemory:
    """`Capturing` in memory that graphs share of which only one runs at a time."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.tell: Callable[[object], None] | None = None  # what was captured, by its key

    @property
    def alone(self) -> GraphMemory:
        return self

    def capture(
        self, first: Callable[[], object], step: Callable[[], Made], key: object
    ) -> tuple[Graph, Made]:
        self.rehearse(first, key)
        return self.record(step)

    def rehearse(self, first: Callable[[], object], key: object) -> None:
        if self.tell is not None:
            self.tell(key)
        run_aside(first)

    def record(self, step: Callable[[], Made]) -> tuple[Graph, Made]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.handle, capture_error_mode=CAPTURE_MODE):
            made = step()
        return graph, made


class Decoded(NamedTuple):
    """What a step gives of each token; good until the next step."""

    logits: Tensor  # [tokens, vocab]
    hidden: Tensor  # [tokens, hidden] after the last norm
    streams: tuple[Tensor, ...] = ()  # before the layers that are tapped, [tokens, hidden] each


class DecodeStep(Protocol):
    def __call__(
        self,
        row_ids: Tensor,
        positions: Tensor,
        max_context: int,
        shares_prefix: bool,
        nodes: Nodes | None = None,
    ) -> Decoded:
        """A step in which every token is a sequence that ends with it."""
        ...


GraphKey = tuple[int, int, bool, int]  # tokens, context, whether they share a prefix, path width


@dataclass(slots=True)
class Captured:
    graph: Graph
    rows: Tensor  # [tokens] int32
    positions: Tensor  # [tokens] int32
    nodes: Nodes | None
    made: Decoded

    def replay(self, rows: Tensor, positions: Tensor, nodes: Nodes | None) -> Decoded:
        inputs = (self.rows, self.positions, *(self.nodes or ()))
        for own, given in zip(inputs, (rows, positions, *(nodes or ())), strict=True):
            if own.data_ptr() != given.data_ptr():
                own.copy_(given)
        self.graph.replay()
        return self.made


class GraphCache:
    def __init__(
        self,
        step: DecodeStep,
        max_batch: int,
        max_context: int,
        spare_row: int,
        memory: Capturing | None = None,
    ) -> None:
        """`memory`: None: its own."""
        self.step, self.max_context, self.spare_row = step, max_context, spare_row
        self.sizes = sorted({*BATCH_SIZES, max_batch})  # drafts may outnumber rows
        self.graphs: dict[GraphKey, Captured] = {}
        self.memory: Capturing = GraphMemory() if memory is None else memory
        self._too_large: set[GraphKey] = set()

    def covers(self, num_tokens: int, longest: int) -> bool:
        """Whether a graph of this size is worth its attention scratch, which grows with both."""
        if num_tokens > self.sizes[-1]:
            return False
        return self.batch_bucket(num_tokens) * self.context_bucket(longest) <= MAX_KEYS

    def batch_bucket(self, num_tokens: int) -> int:
        return next(n for n in self.sizes if n >= num_tokens)

    def context_bucket(self, longest: int) -> int:
        bound = SHORTEST_CONTEXT
        while bound < longest:
            bound *= 4
        return min(bound, self.max_context)

    def lacks(self, key: GraphKey) -> bool:
        """Whether it would be captured now."""
        return key not in self.graphs and key not in self._too_large

    def replay(
        self,
        rows: Tensor,
        positions: Tensor,
        longest: int,
        shares_prefix: bool = False,
        nodes: Nodes | None = None,
    ) -> Decoded:
        """Inputs are already padded to a batch bucket. A new graph keeps them."""
        width = 0 if nodes is None else nodes.paths.shape[1]
        key = (rows.shape[0], self.context_bucket(longest), shares_prefix, width)
        captured = self.graphs.get(key)
        if captured is None and key not in self._too_large:
            try:
                captured = self.graphs[key] = self._capture(rows, positions, *key[1:3], nodes)
            except torch.OutOfMemoryError:
                self._too_large.add(key)
        if captured is None:
            return self.step(rows, positions, *key[1:3], nodes)
        return captured.replay(rows, positions, nodes)

    def _capture(
        self,
        rows: Tensor,
        positions: Tensor,
        max_context: int,
        shares_prefix: bool,
        nodes: Nodes | None,
    ) -> Captured:
        spare, zeros = torch.full_like(rows, self.spare_row), torch.zeros_like(positions)
        bounds, alone = (max_context, shares_prefix), None
        if nodes is not None:
            alone = Nodes(zeros, torch.full_like(nodes.paths, NO_TREE))
        graph, made = self.memory.capture(
            lambda: self.step(spare, zeros, *bounds, alone),
            lambda: self.step(rows, positions, *bounds, nodes),
            ("decodes", len(rows), *bounds),
        )
        return Captured(graph, rows, positions, nodes, made)


def buckets_of(graphs: GraphCache) -> list[int]:
    """All upper bounds of contexts that graphs are keyed by."""
    found = [graphs.context_bucket(1)]
    while found[-1] < graphs.max_context:
        found.append(graphs.context_bucket(found[-1] + 1))
    return found


def run_aside(work: Callable[[], object]) -> None:
    """Run `work` once on a side stream before a capture: compiles kernels, sizes workspaces."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            work()
    finally:
        torch.cuda.current_stream().wait_stream(side)
