"""DraftDraws: tokens drawn from a head's logits as the target will draw there, into its rows.

The request's temperature, filters, penalties and grammar, and the noise of the very position:
where head and target agree, so do their draws. Grammars are followed on forks of their matchers,
which last as long as one step's drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from enum import Enum, auto

import numpy as np
from torch import Tensor

from quire.grammar.live import LiveMatchers
from quire.grammar.matcher import GrammarError
from quire.request import RequestId
from quire.runner.drafter import drafting_rows, fork_matchers
from quire.runner.gather import StepShape
from quire.runner.masks import GrammarMasks
from quire.runner.rows import (
    GRAMMAR,
    HIDDEN,
    LOGPROBS,
    MIN_P,
    NOT_GREEDY,
    TOP_K,
    TOP_P,
)
from quire.runner.runner import ModelRunner
from quire.runner.sampling import filtered_inputs, sample_inputs
from quire.runner.trees import StepTrees, TreeNode
from quire.runner.upload import IntArray, Uploader
from quire.sample.sampler import Sampler
from quire.step import Work

MAX_PLACES = 1 << 10  # nodes of a tree, at the very most
FILTERS = TOP_K | TOP_P | MIN_P


class DrawForm(Enum):
    """How a graph of a head draws."""

    APART = auto()  # not at all: somebody asks for what a graph cannot read, or guesses are a tree
    WHOLE = auto()  # from all tokens
    NARROWED = auto()  # from those that filters leave


class DraftDraws:
    def __init__(self, target: ModelRunner) -> None:
        self._target, self.rows = target, drafting_rows(target.rows, 1)
        self._sampler = Sampler(target.sampler.ops)  # the target's may tell other ranks
        self._uploader = Uploader(target.model.device)
        self._matchers = LiveMatchers()
        size = target.model.spec.vocab_size
        self._masks = GrammarMasks(self._matchers, size, self._uploader)
        self._judged: list[Work] = []
        self._branches: list[RequestId] = []  # matchers of the nodes of trees

    def begin(self, works: Sequence[Work]) -> None:
        """These works are about to get drafts."""
        needs = self._target.rows.needs
        self.rows.needs = needs & ~(LOGPROBS | HIDDEN)
        self._judged = [work for work in works if needs[work.row] & GRAMMAR]
        if self._judged:
            self._target.masks.catch_up()
            ids = [work.request_id for work in self._judged]
            fork_matchers(ids, self._target.matchers, self._matchers)

    def form(self, works: Sequence[Work]) -> DrawForm:
        """Of a graph that may draw for these works, of whom none has a tree."""
        needs = int(np.bitwise_or.reduce(self.rows.needs[[work.row for work in works]]))
        if needs & ~(NOT_GREEDY | FILTERS):
            return DrawForm.APART
        return DrawForm.NARROWED if needs & FILTERS else DrawForm.WHOLE

    def draw_lasting(
        self, logits: Tensor, row_ids: Tensor, positions: Tensor, form: DrawForm
    ) -> None:
        """As `draw`, of what a graph can capture."""
        inputs = filtered_inputs(self.rows, row_ids, positions, form is DrawForm.NARROWED)
        self._sampler.ops.draw(logits, inputs)

    def draw(self, works: Sequence[Work], positions: Sequence[int], logits: Tensor) -> None:
        """A token for each of these works' rows at its position, from logits [works, tokens]."""
        fed = tuple(
            Work(work.request_id, work.row, position - 1, 1, True)
            for work, position in zip(works, positions, strict=True)
        )
        shape = StepShape(fed, self.rows.max_rows)
        arrays: dict[str, IntArray] = {}
        shape.stage(arrays)
        sent = self._uploader.send(arrays)
        mask = None
        if self._judged and np.bitwise_or.reduce(self.rows.needs[shape.rows]) & GRAMMAR:
            mask, _ = self._masks.make(self.rows, fed, shape)
        inputs = sample_inputs(self.rows, shape, sent, self._uploader, mask)
        drawn = self._sampler(logits, inputs)
        if mask is not None:
            self._follow(fed, drawn.tokens)

    def draw_children(self, nodes: Sequence[TreeNode], logits: Tensor) -> None:
        """Tokens for all that follow these nodes of trees, from logits [nodes, tokens].

        The first of a node's children is the draw, the second what would be drawn in its place."""
        fed = tuple(node.alone(_id_of(node)) for node in nodes)
        shape = StepShape(fed, self.rows.max_rows, trees=StepTrees.of_nodes(nodes))
        made = [
            (at, rank, node.work.row, node.work.start + child)
            for at, node in enumerate(nodes)
            for rank, child in enumerate(node.children)
        ]
        arrays: dict[str, IntArray] = {"children": np.array(made, np.int64).T}
        shape.stage(arrays)
        sent = self._uploader.send(arrays)
        mask = None
        is_judged = bool(np.bitwise_or.reduce(self.rows.needs[shape.rows]) & GRAMMAR)
        if is_judged:
            self._fork_roots(nodes)
            mask, _ = self._masks.make(self.rows, fed, shape)
        inputs = sample_inputs(self.rows, shape, sent, self._uploader, mask)
        ops, width = self._sampler.ops, max(len(node.children) for node in nodes)
        tokens = ops.ranked(self._sampler.edited(logits, inputs), inputs, width)  # [nodes, width]
        which, ranks, rows, places = sent["children"].view(4, -1)
        self.rows.tokens[rows, places] = tokens[which, ranks].int()
        known = tokens.tolist() if is_judged else []  # a GPU is waited for
        for at, rank, _, place in made if is_judged else ():
            node = nodes[at]
            self._follow_child(node, place - node.work.start, known[at][rank])

    def _fork_roots(self, nodes: Sequence[TreeNode]) -> None:
        for node in nodes:
            matcher = None if node.node else self._matchers.get(node.work.request_id)
            if matcher is not None:
                self._branches.append(_id_of(node))
                self._matchers.add(_id_of(node), matcher.fork())

    def _follow_child(self, node: TreeNode, child: int, token: int) -> None:
        """A matcher for what follows the child, if anything does."""
        behind, matcher = TreeNode(node.work, child), self._matchers.get(_id_of(node))
        if matcher is None or not behind.children:
            return
        made = matcher.fork()
        with suppress(GrammarError):  # the next mask says so
            made.accept(token)
        self._branches.append(_id_of(behind))
        self._matchers.add(_id_of(behind), made)

    def rehearse(self, works: Sequence[Work], logits: Tensor) -> None:
        """As `draw` for requests that take the likeliest token; for measuring."""
        self.rows.needs = np.zeros_like(self._target.rows.needs)
        self.draw(works, [work.start + 1 for work in works], logits)

    def _follow(self, works: Sequence[Work], tokens: Tensor) -> None:
        for work, token in zip(works, tokens.tolist(), strict=True):
            matcher = self._matchers.get(work.request_id)
            if matcher is not None:
                with suppress(GrammarError):  # the next mask says so
                    matcher.accept(token)

    def end(self) -> None:
        for request_id in (*(work.request_id for work in self._judged), *self._branches):
            self._matchers.drop(request_id)
        self._judged, self._branches = [], []


def _id_of(node: TreeNode) -> RequestId:
    """Under which the matcher of a node is kept: of no request."""
    return RequestId(-1 - node.work.row * MAX_PLACES - node.node)
