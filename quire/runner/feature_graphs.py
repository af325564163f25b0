"""FeatureGraphs: the guesses of a head with a layer of its own as graphs (`head_graphs.py`).

There are three pieces. One reads the states that were kept, of all requests, for keys and values.
One guesses from the last position of each. One reads a guess and guesses on. Where requests ask for
a temperature and filters at most, pieces draw as well and write the drafts into the rows, so a
chain is a few replays: rows and positions of all its levels go up at once. Requests with shorter
chains are the spare row's from their end on. Penalties, grammars and trees draw between the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.forward import Batch, LayerContext
from quire.models.heads.feature_head import Guessed, Stored
from quire.runner.draft_draws import DraftDraws, DrawForm
from quire.runner.gather import decode_batches
from quire.runner.graphs import USUAL, GraphCache, buckets_of
from quire.runner.head_graphs import HeadGraphs, Lasting
from quire.runner.rows import RequestRows
from quire.runner.trees import NO_TREE, Nodes, StepTrees, TreeNode
from quire.runner.upload import IntArray, Uploader
from quire.step import Work

if TYPE_CHECKING:
    from quire.runner.feature_drafter import HeadLayer

ROWS, POSITIONS, INDEX, DRAWN = range(4)  # what a guess reads: of each request an int32


class FeatureGraphs:
    def __init__(
        self, decodes: GraphCache, layer: HeadLayer, rows: RequestRows, draws: DraftDraws
    ) -> None:
        """`rows` have at each position the token behind it. Sizes and bounds are those of
        `decodes`, the target's."""
        self._decodes, self._layer, self._rows, self._draws = decodes, layer, rows, draws
        device = rows.tokens.device
        self._uploader, self._kept = Uploader(device), Lasting(decodes.sizes[-1])
        self._graphs = HeadGraphs(decodes.memory.alone, self._kept)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, self._kept.most, dtype=torch.int32, device=device)

        self._fed = zeros(2)  # rows and positions of the states that are read
        self._now = zeros(4)
        self._places = zeros()
        self._paths: dict[int, Tensor] = {}  # by their width

    def covers(self, num_works: int, num_tokens: int, longest: int) -> bool:
        """Whether so many works that feed so many tokens have graphs, with contexts up to this."""
        sizes = self._decodes.sizes
        return num_tokens <= sizes[-1] and self._decodes.covers(num_works, longest)

    # ------------------------------------------------------------ guesses

    def draft(
        self, works: Sequence[Work], fed: Sequence[Work], states: list[Tensor], form: DrawForm
    ) -> None:
        """Chains of drafts into the rows of `works`, behind the states that `fed` says."""
        levels = self._begin(works, fed, states, max(work.num_drafts for work in works))
        size = levels.shape[2]
        bound = self._bound(work.start + work.num_drafts for work in works)
        for depth, level in enumerate(levels):
            self._now[:, :size].copy_(level)
            self._run("next" if depth else "first", size, bound, form)

    def first(self, works: Sequence[Work], fed: Sequence[Work], states: list[Tensor]) -> Guessed:
        """What is guessed behind the newest token of each work, to be drawn from."""
        (level,) = self._begin(works, fed, states, 1)
        size = level.shape[1]
        self._now[:, :size].copy_(level)
        bound = self._bound(work.start for work in works)
        return self._guessed(self._run("first", size, bound, DrawForm.APART), len(works))

    def follow(self, works: Sequence[Work], features: Tensor) -> Guessed:
        """The same behind one token each, which `works` feed."""
        level = np.zeros((4, self._decodes.batch_bucket(len(works))), np.int32)
        level[ROWS] = self._spare
        level[ROWS, : len(works)] = [work.row for work in works]
        level[POSITIONS, : len(works)] = [work.start for work in works]
        return self._follow(level, features, None, self._bound(w.start + 1 for w in works))

    def follow_nodes(self, nodes: Sequence[TreeNode], features: Tensor) -> Guessed:
        """The same behind drafts of trees, which begin at the position before their works."""
        trees, num = StepTrees.of_nodes(nodes), len(nodes)
        size = self._decodes.batch_bucket(num)
        level, padded = np.zeros((4, size), np.int32), StepTrees.empty(size, trees.paths.shape[1])
        level[ROWS] = self._spare
        level[ROWS, :num] = [node.work.row for node in nodes]
        places = np.asarray([node.place for node in nodes], np.int32)
        level[POSITIONS, :num] = places - trees.shifts
        padded.paths[:num], padded.shifts[:num] = trees.paths, trees.shifts
        bound = self._bound(node.work.start + len(node.parents) + 1 for node in nodes)
        return self._follow(level, features, padded, bound)

    def _follow(
        self, level: IntArray, features: Tensor, trees: StepTrees | None, bound: int
    ) -> Guessed:
        size, width = level.shape[1], 0
        arrays: dict[str, IntArray] = {"level": level}
        if trees is not None:
            width = trees.paths.shape[1]
            arrays |= {"places": level[POSITIONS] + trees.shifts, "paths": trees.paths}
        sent = self._uploader.send(arrays)
        self._now[:, :size].copy_(sent["level"].view(4, -1))
        if trees is not None:
            self._places[:size].copy_(sent["places"])
            self._paths_of(width)[:size].copy_(sent["paths"].view(size, -1))
        self._kept.put("features", features)
        return self._guessed(self._run("next", size, bound, DrawForm.APART, width), len(features))

    def _begin(
        self, works: Sequence[Work], fed: Sequence[Work], states: list[Tensor], depth: int
    ) -> Tensor:
        """Reads the states; [levels, 4, size] for what is guessed behind them."""
        num_tokens = sum(work.num_tokens for work in fed)
        tokens = np.zeros((2, self._decodes.batch_bucket(num_tokens)), np.int32)
        tokens[ROWS] = self._spare
        tokens[:, :num_tokens] = _positions(fed)
        size = self._decodes.batch_bucket(len(works))
        levels = _levels(works, fed, np.arange(depth), size, self._spare)
        sent = self._uploader.send({"levels": levels, "tokens": tokens})
        self._fed[:, : tokens.shape[1]].copy_(sent["tokens"].view(tokens.shape))
        self._kept.put_joined("states", states)
        self._run_read(tokens.shape[1])
        return sent["levels"].view(levels.shape)

    def _guessed(self, logits: Tensor | None, num: int) -> Guessed:
        assert logits is not None, "a piece that draws hands out no logits"
        return Guessed(logits[:num], self._kept.first("features", num))

    @property
    def _spare(self) -> int:
        return self._decodes.spare_row

    def _bound(self, lens: Iterator[int]) -> int:
        return self._decodes.context_bucket(max(lens))

    # ------------------------------------------------------------ ahead

    def ahead(self, like: Tensor, most_works: int) -> Iterator[Callable[[], object]]:
        """Captures of what comes most often, one a call; `like` are states of one position."""
        decodes = self._decodes
        for size in decodes.sizes:
            yield partial(self._nobody_reads, like, size)
        for bound in buckets_of(decodes)[:USUAL]:
            for size in decodes.sizes:
                if size <= decodes.batch_bucket(most_works) and decodes.covers(size, bound):
                    for form in (DrawForm.WHOLE, DrawForm.NARROWED):
                        yield partial(self._nobody_guesses, size, bound, form)

    def _nobody_reads(self, like: Tensor, size: int) -> None:
        self._kept.place("states", like)
        self._fed[ROWS].fill_(self._spare)
        self._fed[POSITIONS].zero_()
        self._run_read(size)

    def _nobody_guesses(self, size: int, bound: int, form: DrawForm) -> None:
        self._now.zero_()
        self._now[ROWS].fill_(self._spare)
        for kind in ("first", "next"):
            self._run(kind, size, bound, form)

    # ------------------------------------------------------------ pieces

    def _run_read(self, size: int) -> None:
        self._graphs.run(("head reads", size), partial(self._read, size))

    def _run(
        self, kind: str, size: int, bound: int, form: DrawForm, width: int = 0
    ) -> Tensor | None:
        piece = self._first if kind == "first" else self._next
        key = (f"head's {kind}", size, bound, form.name, width)
        return self._graphs.run(key, partial(piece, size, bound, form, width))

    def _read(self, size: int) -> None:
        head = self._layer.head
        batch = self._batch(self._fed[:, :size], 1)  # nothing attends
        features = head.features(self._kept.first("states", size))
        stored = head.store(batch.input_ids, features, self._context(batch, 1))
        for name, part in stored._asdict().items():
            self._kept.put(name, part)

    def _first(self, size: int, bound: int, form: DrawForm, width: int) -> Tensor | None:
        batch = self._batch(self._now[:INDEX, :size], bound)
        at = self._context(batch, bound)
        # Plain launches behind the plan, which attention reads early (`kernels/early.py`).
        stored = Stored(*self._kept.chosen(Stored._fields, self._now[INDEX, :size]))
        return self._end(self._layer.head.attend(stored, at), size, form)

    def _next(self, size: int, bound: int, form: DrawForm, width: int) -> Tensor | None:
        nodes = Nodes(self._places[:size], self._paths_of(width)[:size]) if width else None
        batch = self._batch(self._now[:INDEX, :size], bound, nodes)
        at, head = self._context(batch, bound), self._layer.head
        stored = head.store(batch.input_ids, self._kept.first("features", size), at)
        return self._end(head.attend(stored, at), size, form)

    def _end(self, guessed: Guessed, size: int, form: DrawForm) -> Tensor | None:
        """What the next piece reads, and the draw."""
        self._kept.put("features", guessed.features)
        vocabulary = self._layer.head.vocabulary
        logits = guessed.logits if vocabulary is None else vocabulary.spread(guessed.logits)
        if form is DrawForm.APART:
            return logits
        self._draws.draw_lasting(logits, self._now[ROWS, :size], self._now[DRAWN, :size], form)
        return None

    def _batch(self, at: Tensor, bound: int, nodes: Nodes | None = None) -> Batch:
        """`at` [2, tokens]: rows and positions."""
        size, lens = self._layer.spec.page_size, np.full(at.shape[1], bound, np.int32)
        rows, positions = at
        return decode_batches(self._rows, rows, positions, size, lens, nodes=nodes)[0]

    def _context(self, batch: Batch, bound: int) -> LayerContext:
        backend, spec = self._layer.backend, self._layer.spec
        return LayerContext(backend, self._layer.pool.layer(0), backend.plan(batch, spec, bound))

    def _paths_of(self, width: int) -> Tensor:
        if width not in self._paths:
            self._paths[width] = self._places.new_full((self._kept.most, width), NO_TREE)
        return self._paths[width]


def _positions(fed: Sequence[Work]) -> IntArray:
    """[2, tokens]: the row and the position of all that is fed."""
    lens = [work.num_tokens for work in fed]
    starts = np.repeat([work.start for work in fed], lens)
    nth = np.arange(len(starts)) - np.repeat(np.cumsum(lens) - lens, lens)
    return np.stack((np.repeat([work.row for work in fed], lens), starts + nth)).astype(np.int32)


def _levels(
    works: Sequence[Work], fed: Sequence[Work], depths: IntArray, size: int, spare: int
) -> IntArray:
    """[levels, 4, size] of chains: the head reads a token at the position before it."""
    made = np.zeros((len(depths), 4, size), np.int32)
    made[:, ROWS], num = spare, len(works)
    rows, starts, nums = np.asarray([(w.row, w.start, w.num_drafts) for w in works], np.int32).T
    is_on = nums > depths[:, None]  # [levels, works]
    places = starts + depths[:, None]
    made[:, ROWS, :num] = np.where(is_on, rows, spare)
    made[:, POSITIONS, :num] = np.where(is_on, places - 1, 0)
    made[:, DRAWN, :num] = np.where(is_on, places + 1, 0)
    made[0, INDEX, :num] = np.cumsum([work.num_tokens for work in fed]) - 1
    return made
