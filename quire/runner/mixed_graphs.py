"""MixedGraphs: CUDA graphs of steps with prompts and decodes together, or with several prompts.

Launching such a step kernel by kernel takes the host longer than a few hundred tokens take the
device. A graph is keyed by the number of tokens it is padded to and by the number of single tokens
that attention is laid out for. It ends before the attention of the last layer: the rest runs for
the sampled tokens only, whose number varies. The graph reads the step's upload at the address it
had when the graph was captured. Sequences and attention tiles are padded to a fixed number; the
padding is empty. As in `prompt_graphs.py`, a size is captured when it comes for the second time.
The memory pool is that of the decode graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire.forward import ForwardContext
from quire.runner.graphs import Graph, GraphCache
from quire.runner.prompt_graphs import SIZES as LONE_SIZES
from quire.runner.prompt_graphs import Inputs, bring

# Tokens. Beyond 256: sizes at which the library's products are quick, in models of 8B and 14B on an
# H200. Beyond the last size the device takes longer than the host, so a graph gains nothing.
SIZES = (64, 128, 192, 256, 304, 336, 432, 528, 624, 720, 816, 1008)
LARGE_SIZES = (1536, 2048, 3072, 4096)  # small models are as quick with these
LARGE_WORK = 4 << 40  # tokens times weights of a layer-by-layer step that takes the host as long
SINGLES = 128  # attention is laid out for a multiple of this many single tokens
MOST_PROMPTS = 8  # in a small step; padding of more than one token counts as a prompt
PROMPT_LEN = 64  # larger steps have room for a prompt for each so many tokens
LONGEST = 8192  # tokens of context: one program walks them, and longer ones would hold up all

# What a step uploads before anything whose size varies.
STAGED = ("mixed_tiles", "rows", "positions", "token_rows", "query_starts", "context_lens")


class Queries(NamedTuple):
    """A step up to its last layer's attention."""

    ctx: ForwardContext
    q: Tensor  # [tokens, heads, dim]
    residual: Tensor  # [tokens, hidden]


MixedStep = Callable[[Inputs, int], Queries]  # (upload, single tokens to lay attention out for)


class MixedSize(NamedTuple):
    """What a graph is keyed by."""

    num_tokens: int
    num_singles: int

    @property
    def num_seqs(self) -> int:
        """One for each token, one that feeds the padding, and two that feed nothing."""
        return self.num_tokens + 3

    @property
    def most_prompts(self) -> int:
        return max(MOST_PROMPTS, self.num_tokens // PROMPT_LEN)


class Captured(NamedTuple):
    graph: Graph
    inputs: Inputs
    queries: Queries

    def replay(self, inputs: Inputs) -> Queries:
        bring(inputs, self.inputs)
        self.graph.replay()
        return self.queries


class MixedGraphs:
    def __init__(self, step: MixedStep, decodes: GraphCache, num_weights: int) -> None:
        """`num_weights`: those that a token is multiplied with."""
        self.step, self.decodes = step, decodes
        large = (size for size in LARGE_SIZES if size * num_weights <= LARGE_WORK)
        self.sizes = (*SIZES, *large)
        self.graphs: dict[MixedSize, Captured] = {}
        self._seen: set[MixedSize] = set()
        self._too_large: set[MixedSize] = set()

    def size_for(self, query_lens: Sequence[int], longest: int) -> MixedSize | None:
        """What to pad a step to, if there is or should be a graph for it; else None.

        `query_lens` are the tokens that each sequence feeds, `longest` is the longest context."""
        num_tokens = sum(query_lens)
        found = next((size for size in self.sizes if size >= num_tokens), None)
        num_prompts = sum(num > 1 for num in query_lens)
        if found is None or num_prompts == 0 or longest > LONGEST:
            return None
        if len(query_lens) == 1 and num_tokens <= LONE_SIZES[-1]:
            return None  # has a graph of its own, when it is due
        rest = found - num_tokens
        num_singles = len(query_lens) - num_prompts + (rest == 1)
        size = MixedSize(found, max(1, -(-num_singles // SINGLES)) * SINGLES)
        if rest > self.decodes.max_context or num_prompts + (rest > 1) > size.most_prompts:
            return None
        if size not in self._seen:
            self._seen.add(size)
            return None
        return None if size in self._too_large else size

    def lacks(self, size: MixedSize) -> bool:
        """Whether it would be captured now."""
        return size not in self.graphs and size not in self._too_large

    def replay(self, inputs: Inputs, size: MixedSize) -> Queries:
        """`inputs` are those of a step padded to `size`; a new graph keeps them.

        The result is valid until the next step."""
        captured = self.graphs.get(size)
        if captured is None:
            inputs = {name: inputs[name] for name in STAGED}
            try:
                captured = self.graphs[size] = self._capture(inputs, size.num_singles)
            except torch.OutOfMemoryError:
                self._too_large.add(size)
                return self.step(inputs, size.num_singles)
        return captured.replay(inputs)

    def _capture(self, inputs: Inputs, num_singles: int) -> Captured:
        step = partial(self.step, inputs, num_singles)
        key = ("mixed", len(inputs["positions"]), num_singles)
        graph, queries = self.decodes.memory.capture(step, step, key)  # replays write it once more
        return Captured(graph, inputs, queries)
