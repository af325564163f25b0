"""JointGraphs: CUDA graphs in which ranks talk to each other. All have one, or none has it.

The first rank says with each plan which form its step takes and whether it is captured
(`step_forms.py`); everybody does so in the same order. A graph counts once all have captured it,
and where one had no room for it, nobody tries that one again. Graphs end before the way to the
others does, and none is launched once that is lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from quire.dist.comm import Graphed
from quire.dist.ranks import Ranks
from quire.runner.graphs import Capturing, Graph, GraphCache, GraphMemory, Made
from quire.step import StepForm


class JointGraph:
    """`graphs.Graph`."""

    def __init__(self, graph: Graph, way: Graphed) -> None:
        self._graph: Graph | None = graph
        self._way, self.num_replays = way, 0

    def replay(self) -> None:
        assert self._graph is not None, "replayed after its end"
        self._way.launch(self._graph.replay)
        self.num_replays += 1

    def end(self) -> None:
        """It is not replayed again; what it works with is given back."""
        graph, self._graph = self._graph, None
        if isinstance(graph, torch.cuda.CUDAGraph):
            with suppress(RuntimeError):  # of a device that failed
                graph.reset()


class JointMemory:
    """`graphs.Capturing`, of a rank."""

    def __init__(self, own: GraphMemory, ranks: Ranks, device: torch.device) -> None:
        assert ranks.graphed is not None, "ranks whose words to each other no graph can hold"
        self._own, self._ranks, self._way, self._device = own, ranks, ranks.graphed, device
        self._graphs: list[JointGraph] = []
        self._is_due = False  # the first rank has ordered a capture, which has not been
        self._ended = weakref.finalize(self, _end, self._graphs)

    @property
    def alone(self) -> GraphMemory:
        return self._own

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self._graphs)

    @contextmanager
    def step(self, form: StepForm) -> Iterator[None]:
        """A step in the form that the first rank has said. Raises RuntimeError where this rank
        has other graphs than that one."""
        self._is_due = form.captures
        yield
        if self._is_due:
            raise RuntimeError(f"this rank has a graph that others have yet to capture: {form}")

    def capture(
        self, first: Callable[[], object], step: Callable[[], Made], key: object
    ) -> tuple[Graph, Made]:
        if not self._is_due:
            raise RuntimeError(f"this rank lacks the graph {key}, which others have")
        self._is_due = False
        assert not self._ranks.hush.is_on, "a graph without what ranks say"
        try:
            self._own.rehearse(first, key)  # with everybody: ways are made when first used
        except torch.OutOfMemoryError as error:  # the others wait in the middle of it
            raise RuntimeError(f"no memory for a step of all ranks: {error}") from error
        made: tuple[Graph, Made] | None = None
        with suppress(torch.OutOfMemoryError):
            made = self._own.record(step)
        if not self._by_all(made is not None) or made is None:
            raise torch.OutOfMemoryError(f"a rank has no room for the graph {key}")
        graph = JointGraph(made[0], self._way)
        self._graphs.append(graph)
        return graph, made[1]

    def _by_all(self, is_captured: bool) -> bool:
        said = torch.full((1, 1), is_captured, dtype=torch.int32, device=self._device)
        heard = self._ranks.comm.gather_rows(said, [1] * self._ranks.size).tolist()
        self._ranks.comm.check()
        return all(count for (count,) in heard)

    def end(self) -> None:
        """All graphs do."""
        _end(self._graphs)


def _end(graphs: list[JointGraph]) -> None:
    for graph in graphs:
        graph.end()


def graph_memory(ranks: Ranks, device: torch.device) -> Capturing:
    """For the graphs of this rank's model."""
    own = GraphMemory()
    return own if ranks.is_alone else JointMemory(own, ranks, device)


@contextmanager
def as_told(graphs: GraphCache | None, form: StepForm | None) -> Iterator[None]:
    """A step in the form that the first rank has said; None: it says nothing."""
    if form is None:
        yield
        return
    if graphs is None or not isinstance(graphs.memory, JointMemory):
        raise RuntimeError(f"got {form} for a rank that captures nothing")
    with graphs.memory.step(form):
        yield


def end_graphs(graphs: GraphCache | None) -> None:
    """Those that other ranks have a part in: before the way to them ends."""
    if graphs is not None and isinstance(graphs.memory, JointMemory):
        graphs.memory.end()
