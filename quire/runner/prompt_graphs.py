"""PromptGraphs: CUDA graphs of steps that feed one short prompt and nothing else.

Launching such a step kernel by kernel takes the host longer than the kernels take. Like a decode
graph (`graphs.py`), a graph is keyed by the number of tokens it is padded to and by an upper bound
on the context, and it uses the same memory pool. Padding is a sequence of its own, on the spare
row. The graph reads the step's upload at the address it had when the graph was captured. A size is
captured when it comes for the second time, so that the first prompt does not wait. A size that ran
out of memory is not tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.runner.graphs import Graph, GraphCache

SIZES = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)  # beyond, kernels outlast the host

# What a step of one prompt uploads before anything whose size varies.
STAGED = (
    *("rows", "positions", "sample_rows", "sample_positions", "sample_index"),
    *("token_rows", "query_starts", "context_lens", "tiles"),
)

Inputs = Mapping[str, Tensor]
PromptStep = Callable[[Inputs, int], Tensor]  # (upload, max_context) -> logits


def bring(inputs: Inputs, to: Inputs) -> None:
    """Copy an upload to where a graph reads it, unless it is already there."""
    for name, place in to.items():
        if place.data_ptr() != inputs[name].data_ptr():
            place.copy_(inputs[name])


@dataclass(slots=True)
class CapturedPrompt:
    graph: Graph
    inputs: Inputs
    logits: Tensor  # [1, vocab]

    def replay(self, inputs: Inputs) -> Tensor:
        bring(inputs, self.inputs)
        self.graph.replay()
        return self.logits


class PromptGraphs:
    def __init__(self, step: PromptStep, decodes: GraphCache, fewest: int) -> None:
        """From `fewest` tokens on, the attention backend has plans for prompts."""
        self.step, self.decodes, self.fewest = step, decodes, fewest
        self.graphs: dict[tuple[int, int], CapturedPrompt] = {}
        self._seen: set[tuple[int, int]] = set()
        self._too_large: set[tuple[int, int]] = set()

    def size_for(self, num_tokens: int, context: int) -> int:
        """Tokens to pad to, if there is or should be a graph for this step; otherwise 0."""
        if not self.fewest <= num_tokens <= SIZES[-1]:
            return 0
        size = next(size for size in SIZES if size >= num_tokens)
        if size > self.decodes.max_context or not self.decodes.covers(1, context):
            return 0
        key = (size, self.decodes.context_bucket(context))
        if key in self._seen:
            return 0 if key in self._too_large else size
        self._seen.add(key)
        return 0

    def lacks(self, size: int, bound: int) -> bool:
        """Whether it would be captured now."""
        return (size, bound) not in self.graphs and (size, bound) not in self._too_large

    def replay(self, inputs: Inputs, context: int) -> Tensor:
        """`inputs` are those of a step padded to `size_for`; a new graph keeps them."""
        bound = self.decodes.context_bucket(context)
        key = (len(inputs["positions"]), bound)
        captured = self.graphs.get(key)
        if captured is None:
            inputs = {name: inputs[name] for name in STAGED}
            try:
                captured = self.graphs[key] = self._capture(inputs, bound)
            except torch.OutOfMemoryError:
                self._too_large.add(key)
                return self.step(inputs, bound)
        return captured.replay(inputs)

    def _capture(self, inputs: Inputs, bound: int) -> CapturedPrompt:
        step = partial(self.step, inputs, bound)
        key = ("prompt", len(inputs["positions"]), bound)
        graph, logits = self.decodes.memory.capture(step, step, key)  # replays write it once more
        return CapturedPrompt(graph, inputs, logits)
