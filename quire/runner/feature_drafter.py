"""FeatureDrafter: a head with a layer of its own (EAGLE-3, MTP) that drafts from hidden states.

After each step the target's states are kept; before the next, the head reads those of positions
that turned out right and guesses on from the last. Its keys and values lie in pages of its own
under the target's page numbers. Where a prefix was found in the cache they are those of whoever
read it first; if that request had no drafts, they are stale, which costs acceptance only.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attn.backend import AttentionBackend, AttnSpec
from quire.forward import Batch, LayerContext
from quire.memory.pool import PagePool
from quire.models.heads.feature_head import FeatureHead, Guessed, Stored
from quire.native.tape import NotRecordable
from quire.request import RequestId
from quire.runner.draft_draws import DraftDraws, DrawForm
from quire.runner.feature_graphs import FeatureGraphs
from quire.runner.gather import StepShape, decode_batches, ragged_batches
from quire.runner.head_tape import MOST_ROWS, HeadTape
from quire.runner.kept_states import KeptStates
from quire.runner.runner import ModelRunner
from quire.runner.states import StepStates
from quire.runner.tail import sampled_batch
from quire.runner.trees import Nodes, StepTrees, TreeNode
from quire.runner.upload import IntArray, Uploader
from quire.spec.speculation import SpecCounts
from quire.step import StepPlan, Work

WAITING = 32  # positions of a request that are read at once if no drafts are asked for before
LARGE = 1 << 10  # tokens of a step whose states must not stay for the sake of a few of them


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """A head, and where its keys and values lie."""

    head: FeatureHead
    spec: AttnSpec
    backend: AttentionBackend
    pool: PagePool


class FeatureDrafter:
    def __init__(self, target: ModelRunner, layer: HeadLayer, max_tokens: int) -> None:
        """It feeds at most `max_tokens` at once."""
        self.layer, self.max_tokens = layer, max_tokens
        self.counts = SpecCounts()
        self._target, self._kept, self._draws = target, KeptStates(), DraftDraws(target)
        self._uploader = Uploader(target.model.device)
        # At each position the head reads the token behind it.
        self._rows = copy.copy(self._draws.rows)
        self._rows.tokens = target.rows.tokens[:, 1:]
        self.graphs: FeatureGraphs | None = None
        if target.graphs is not None and layer.backend.caps.graphs:
            self.graphs = FeatureGraphs(target.graphs, layer, self._rows, self._draws)
        self._tape: HeadTape | None = None
        if target.tapes is not None:
            with suppress(NotRecordable):
                self._tape = HeadTape(layer, target.model.spec.hidden_size)

    def begin(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._kept.forget(admission.row)
        skipped = [(work, work.start) for work in plan.works if not work.is_read]
        # What is right of what was kept: there is no other chance to read it.
        self._read([due for due in skipped if self._kept.num_before(due[0].row, due[1])])
        for work, _ in skipped:
            self._kept.forget(work.row)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        self.layer.pool.copy(sources, targets)

    def _is_read(self, work: Work) -> bool:
        return work.is_read and self._target.rows.may_draft(work.row)

    def keep(self, works: Sequence[Work], shape: StepShape, states: StepStates) -> None:
        begun = time.perf_counter()
        if states.streams:
            whole = torch.cat(states.streams, 1)
        else:
            assert states.every is not None, "a step without the states asked for"
            whole = states.every.clone()
        ends, is_large = shape.query_ends.tolist(), len(whole) > LARGE
        due: list[tuple[Work, int]] = []
        for work, end in zip(works, ends, strict=False):  # what pads a step comes last
            if not self._is_read(work):
                continue
            own = whole[end - work.num_tokens : end]
            self._kept.put(work.row, work.start, own.clone() if is_large else own)
            # Of the last position the next token is not known, of drafts nothing is.
            stop = work.start + (0 if work.num_drafts else work.num_tokens - 1)
            if self._kept.num_before(work.row, stop) >= WAITING:
                due.append((work, stop))
        self._read(due)
        self.counts.seconds += time.perf_counter() - begun

    def fill(self, works: Sequence[Work]) -> None:
        begun = time.perf_counter()
        # Without states there is nothing to guess from, and whatever the row has is fed.
        ready = [work for work in works if self._kept.num_before(work.row, work.start)]
        self._draws.begin(ready)
        for batch in self._batches(ready):
            self._fill(batch)
        self._draws.end()
        self.counts.seconds += time.perf_counter() - begun

    def _batches(self, works: Iterable[Work]) -> Iterator[list[Work]]:
        batch: list[Work] = []
        num_tokens = 0
        for work in works:
            count = self._kept.num_before(work.row, work.start)
            if count > self.max_tokens:
                self._read([(work, work.start - 1)])
                count = 1
            if batch and num_tokens + count > self.max_tokens:
                yield batch
                batch, num_tokens = [], 0
            batch.append(work)
            num_tokens += count
        if batch:
            yield batch

    def _fill(self, works: list[Work]) -> None:
        fed, states = [], []
        for work in works:
            start, unread = self._kept.take(work.row, work.start)
            fed.append(Work(work.request_id, work.row, start, len(unread), True))
            states.append(unread)
        graphs, has_trees = self._graphs_for(works, fed), any(work.parents for work in works)
        form = DrawForm.APART if has_trees else self._draws.form(works)
        if graphs is not None and form is not DrawForm.APART:
            graphs.draft(works, fed, states, form)
            return
        if graphs is not None:
            guessed = graphs.first(works, fed, states)
        else:
            guessed = self._attend(fed, self.layer.head.features(torch.cat(states)))
        (self._fill_trees if has_trees else self._fill_chains)(works, guessed)

    def _graphs_for(self, works: Sequence[Work], fed: Sequence[Work]) -> FeatureGraphs | None:
        """Where there are any for guesses of these works, which feed so much."""
        longest = max(work.start + work.num_drafts for work in works)
        num_tokens = sum(work.num_tokens for work in fed)
        if self.graphs is None or not self.graphs.covers(len(works), num_tokens, longest):
            return None
        return self.graphs

    def _fill_chains(self, works: list[Work], guessed: Guessed) -> None:
        """Draft by draft, from what was guessed behind each work's newest token."""
        depth = 0
        while True:
            self._draws.draw(works, [work.start + depth + 1 for work in works], guessed.logits)
            depth += 1
            on = [i for i, work in enumerate(works) if work.num_drafts > depth]
            if not on:
                return
            features = guessed.features
            if len(on) < len(works):
                index = self._uploader.send_one(torch.tensor(on))
                features, works = features[index], [works[i] for i in on]
            fed = [Work(w.request_id, w.row, w.start + depth - 1, 1, True) for w in works]
            graphs = self._graphs_for(works, fed)
            guessed = (self._attend if graphs is None else graphs.follow)(fed, features)

    def _fill_trees(self, works: list[Work], guessed: Guessed) -> None:
        """Level by level, from what was guessed behind each work's newest token."""
        level = [TreeNode(work, 0) for work in works]
        while True:
            self._draws.draw_children(level, guessed.logits)
            on = [
                (at, TreeNode(node.work, child))
                for at, node in enumerate(level)
                for child in node.children
                if TreeNode(node.work, child).children
            ]
            if not on:
                return
            level = [node for _, node in on]
            index = self._uploader.send_one(torch.tensor([at for at, _ in on]))
            guessed = self._attend_nodes(level, guessed.features[index])

    def _attend_nodes(self, nodes: Sequence[TreeNode], features: Tensor) -> Guessed:
        """From drafts, each over those on the way to it."""
        # The head reads a token at the position before it, so the tree begins one place earlier.
        before = [TreeNode(work._replace(start=work.start - 1), node) for work, node in nodes]
        fed = [node.alone(node.work.request_id) for node in before]
        graphs = self._graphs_for([node.work for node in nodes], fed)
        if graphs is not None:
            return graphs.follow_nodes(before, features)
        return self._attend(fed, features, StepTrees.of_nodes(before))

    def _read(self, due: Iterable[tuple[Work, int]]) -> None:
        """Positions of these works' rows before the numbers beside them, for keys and values."""
        fed: list[Work] = []
        parts: list[Tensor] = []
        for work, stop in due:
            start, states = self._kept.take(work.row, stop)
            for part in states.split(self.max_tokens):
                if sum(map(len, parts)) + len(part) > self.max_tokens:
                    self._store(fed, self.layer.head.features(torch.cat(parts)))
                    fed, parts = [], []
                fed.append(Work(work.request_id, work.row, start, len(part), False))
                parts.append(part)
                start += len(part)
        if fed:
            self._store(fed, self.layer.head.features(torch.cat(parts)))

    def _store(self, fed: Sequence[Work], features: Tensor) -> None:
        """Keys and values of positions that nothing is drawn from."""
        _, _, batch = self._step(fed)
        self.layer.head.store(batch.input_ids, features, self._context(batch))

    def _attend(
        self, fed: Sequence[Work], features: Tensor, trees: StepTrees | None = None
    ) -> Guessed:
        """From the last position of each."""
        shape, sent, batch = self._step(fed, trees)
        has_tail = len(shape.sampled) < shape.num_tokens
        if self._tape is not None and shape.num_tokens <= MOST_ROWS:
            return self._named(self._tape.run(batch, sent, features, has_tail))
        head, at = self.layer.head, self._context(batch)
        stored = head.store(batch.input_ids, features, at)
        if has_tail:
            at = self._context(sampled_batch(self._rows, shape, sent, batch, 0))
            # Plain launches behind the plan, which attention reads early (`kernels/early.py`).
            stored = Stored(*(part.index_select(0, sent["sample_index"]) for part in stored))
        return self._named(head.attend(stored, at))

    def _step(
        self, fed: Sequence[Work], trees: StepTrees | None = None
    ) -> tuple[StepShape, dict[str, Tensor], Batch]:
        by_node = self.layer.backend.caps.by_node
        shape = StepShape(tuple(fed), self._rows.max_rows, trees=trees, by_node=by_node)
        arrays: dict[str, IntArray] = {}
        shape.stage(arrays)
        sent, size = self._uploader.send(arrays), self.layer.spec.page_size
        if shape.is_decode and (trees is None or by_node):
            at, lens = (sent["rows"], sent["positions"]), shape.sequences().context_lens
            batches = decode_batches(self._rows, *at, size, lens, nodes=Nodes.of(sent))
            return shape, sent, batches[0]
        return shape, sent, ragged_batches(self._rows, shape, sent, size)[0]

    def _context(self, batch: Batch) -> LayerContext:
        backend = self.layer.backend
        return LayerContext(backend, self.layer.pool.layer(0), backend.plan(batch, self.layer.spec))

    def _named(self, guessed: Guessed) -> Guessed:
        """With logits of all the target's tokens."""
        vocabulary = self.layer.head.vocabulary
        if vocabulary is None:
            return guessed
        return guessed._replace(logits=vocabulary.spread(guessed.logits))

    @torch.inference_mode()
    def rehearse(self, num_works: int) -> None:
        """One guess for so many requests, of an engine that has not served anybody yet."""
        starts = [1 + i % (self._rows.max_len - 1) for i in range(num_works)]
        works = [Work(RequestId(0), 0, start, 2, True, 1) for start in starts]
        fed = [Work(RequestId(0), 0, start - 1, 1, True) for start in starts]
        graphs, states = self._graphs_for(works, fed), self._states(num_works)
        if graphs is not None:
            graphs.draft(works, fed, [states], DrawForm.WHOLE)
            return
        guessed = self._attend(fed, self.layer.head.features(states))
        self._draws.rehearse(fed, guessed.logits)

    def _states(self, num: int) -> Tensor:
        """As the target hands them over."""
        model, layers = self._target.model, self.layer.head.reads.layers
        width = model.spec.hidden_size * max(1, len(layers))
        return torch.zeros(num, width, dtype=model.dtype, device=model.device)

    def ahead(self) -> Iterator[Callable[[], object]]:
        """As in `Drafter`."""
        if self.graphs is not None:
            yield from self.graphs.ahead(self._states(1), self._rows.max_rows)
