"""Small real stand-ins for the tests: no mocks.

`PageContentRunner` keeps the *content* of every page and refuses to answer unless each request's
page table spells exactly that request's tokens. A green run means scheduler, allocator, prefix
tree, copy-on-write, preemption and chunking agree about memory, not only about output. Each layer
group is asked for what its layers would read: all that came before, or the window.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from quire.kv.allocator import SCRATCH_PAGE
from quire.kv.tier_index import Wanted
from quire.request import RequestId
from quire.sched.scheduler import Scheduler
from quire.spec.tree import paths_of
from quire.spec.verify import verified, verified_path
from quire.step import Draft, StepPlan, StepResult, TokenEvent, Took, Work

VOCAB = 7


def oracle_next(tokens: list[int], seed: int = 0) -> int:
    """The 'model': depends on recent tokens, on how many there are, and on the seed."""
    return (sum(tokens[-5:]) * 31 + len(tokens) + seed) % VOCAB


@dataclass
class Ready:
    value: StepResult

    def result(self) -> StepResult:
        return self.value


class PageContentRunner:
    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_pages: int,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.page_size, self.windows = page_size, windows
        # (group, position, token) of each slot
        self.pages: list[list[tuple[int, int, int] | None]] = [
            [None] * page_size for _ in range(num_pages)
        ]
        self.tokens: list[list[int]] = [[] for _ in range(max_rows)]
        self.tables = [
            [[SCRATCH_PAGE] * max_pages for _ in range(max_rows)] for _ in range(len(windows))
        ]
        self.seeds = [0] * max_rows
        self.num_copied = self.num_loaded = 0
        # What was saved outside the pool, by key: token ids, and each group's slots.
        self.saved: dict[bytes, tuple[bytes, list[list[tuple[int, int, int] | None]]]] = {}

    def execute(self, plan: StepPlan) -> Ready:
        for a in plan.admissions:
            self.tokens[a.row] = list(a.tokens)
            self.seeds[a.row] = a.seed
        for save in plan.saves:
            saved = (save.tokens, [list(self.pages[page]) for page in save.pages])
            assert self.saved.setdefault(save.key, saved) == saved, "one key, two contents"
        targets = [c.target for c in plan.page_copies]
        assert len(set(targets)) == len(targets), "two copies into one page"
        contents = [list(self.pages[c.source]) for c in plan.page_copies]
        for copy, content in zip(plan.page_copies, contents, strict=True):
            self.pages[copy.target] = content
            self.num_copied += 1
        for load in plan.loads:
            self.pages[load.page] = list(self.saved[load.key][1][load.group])
            self.num_loaded += 1
        for write in plan.page_writes:
            self.tables[write.group][write.row][write.column] = write.page
        for work in plan.works:  # all writes first, as one fused forward does
            assert work.num_tokens > 0, "a forward needs at least one query token"
            if work.num_drafts:
                self._put_drafts(work)
            for group in range(len(self.windows)):
                self._write(work, group)
        sampled = [self._read_and_draw(work) for work in plan.works]
        return Ready(StepResult(sampled))

    def _write(self, work: Work, group: int) -> None:
        for place in range(work.start, work.start + work.num_tokens):
            page = self.tables[group][work.row][place // self.page_size]
            assert page != SCRATCH_PAGE, "wrote to the scratch page"
            token, position = self.tokens[work.row][place], place
            if work.parents:
                position = work.start + len(paths_of(work.parents)[place - work.start])
            self.pages[page][place % self.page_size] = (group, position, token)

    def _read(self, work: Work, group: int) -> None:
        """What the layers of a group see of this work's queries must be this request's tokens."""
        end, window = work.start + work.num_tokens, self.windows[group]
        end = work.start + 1 if work.parents else end
        first = 0 if window is None else max(0, work.start - window + 1)
        table, tokens = self.tables[group][work.row], self.tokens[work.row]
        for position in range(first, end):
            entry = self.pages[table[position // self.page_size]][position % self.page_size]
            assert entry is not None, f"position {position} was never written"
            assert entry[0] == group, f"group {group} reads what group {entry[0]} wrote"
            assert entry[1] == position, f"page holds position {entry[1]}, want {position}"
            assert entry[2] == tokens[position], "pages spell other tokens than the request's"

    def _read_and_draw(self, work: Work) -> tuple[int, ...]:
        for group in range(len(self.windows)):
            self._read(work, group)
        if not work.sample:
            return ()
        if work.parents:
            return self._draw_tree(work)
        end = work.start + work.num_tokens
        tokens, seed = self.tokens[work.row], self.seeds[work.row]
        ends = range(end - work.num_drafts, end + 1)
        drawn = tuple(oracle_next(tokens[:end], seed) for end in ends)
        # The device row knows them before the host does; what follows the first error is junk.
        kept = verified(drawn, tokens[ends[0] : end])
        tokens[ends[0] :] = kept
        return tuple(kept)

    def _draw_tree(self, work: Work) -> tuple[int, ...]:
        """Each draft must find the drafts before it; those that were right move to their slots."""
        start, tokens, seed = work.start, self.tokens[work.row], self.seeds[work.row]
        paths, drawn = paths_of(work.parents), []
        for path in paths:
            own = [tokens[start + node] for node in path]
            for group, table in enumerate(self.tables):
                slots = [self._slot(table[work.row], start + node) for node in path]
                places = enumerate(own, start + 1)
                assert [page[at] for page, at in slots] == [(group, *entry) for entry in places]
            drawn.append(oracle_next(tokens[: start + 1] + own, seed))
        nodes = verified_path(drawn, tokens[start + 1 :], work.parents)
        for table in self.tables:
            for depth, node in enumerate(nodes):
                page, at = self._slot(table[work.row], start + node)
                to, into = self._slot(table[work.row], start + depth)
                to[into] = page[at]
        tokens[start + 1 :] = kept = [drawn[node] for node in nodes]
        return tuple(kept)

    def _slot(self, table: list[int], place: int) -> tuple[list[tuple[int, int, int] | None], int]:
        return self.pages[table[place // self.page_size]], place % self.page_size

    def _put_drafts(self, work: Work) -> None:
        """Behind the newest token; drafts that the plan leaves to the runner are right by half."""
        tokens, end = self.tokens[work.row], work.start + work.num_tokens - work.num_drafts
        assert len(tokens) == end, "drafts that do not follow the newest token"
        assert not work.drafts or len(work.drafts) == work.num_drafts
        for i in range(work.num_drafts):
            guess = (oracle_next(tokens, self.seeds[work.row]) + (end + i) % 2) % VOCAB
            tokens.append(work.drafts[i] if work.drafts else guess)


class FlakyTiers:
    """What the page-content runner saved, as tiers that take their time and lose things.

    Some pages are in memory, others come after a while or, when they are read, turn out bad."""

    def __init__(self, runner: PageContentRunner, rng: random.Random) -> None:
        self.runner, self.rng = runner, rng
        self.in_memory: set[bytes] = set()
        self.arriving: dict[RequestId, tuple[int, list[Wanted]]] = {}  # looks that are left
        self.pinned: dict[RequestId, set[bytes]] = {}

    def has(self, key: bytes) -> bool:
        return key in self.runner.saved

    def fetch(self, owner: RequestId, wanted: Sequence[Wanted], source: str) -> bool:
        assert owner not in self.arriving and all(self.has(node.key) for node in wanted)
        kept = self.rng.random() < 0.3
        if kept:
            self.in_memory.update(node.key for node in wanted)
            return False
        self.arriving[owner] = (self.rng.randint(0, 5), list(wanted))
        return True

    def is_bringing(self, owner: RequestId) -> bool:
        left, wanted = self.arriving.get(owner, (-1, []))
        if left > 0:
            self.arriving[owner] = (left - 1, wanted)
        elif left == 0:
            del self.arriving[owner]
            for node in wanted:
                if self.rng.random() < 0.1:
                    self.lose(node.key)
                    break
                self.in_memory.add(node.key)
        return left > 0

    def lose(self, key: bytes) -> None:
        if not any(key in keys for keys in self.pinned.values()):
            self.runner.saved.pop(key, None)
            self.in_memory.discard(key)

    def pin(self, owner: RequestId, wanted: Wanted) -> bool:
        saved = self.runner.saved.get(wanted.key)
        if wanted.key not in self.in_memory or saved is None or saved[0] != wanted.tokens:
            return False
        self.pinned.setdefault(owner, set()).add(wanted.key)
        return True

    def let_go(self, owner: RequestId) -> None:
        self.arriving.pop(owner, None)
        for key in sorted(self.pinned.pop(owner, set())):
            if self.rng.random() < 0.5:
                self.in_memory.discard(key)


class RandomDrafts:
    """Drafts of random depth, right up to a random place; sometimes left to the runner."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.num_drafted = self.num_accepted = 0

    def make(self, scheduler: Scheduler) -> dict[RequestId, Draft]:
        made = {}
        for request in scheduler.running.values():
            depth = self.rng.choice([0, 0, 1, 2, 3, 5, 9])
            if depth and request.num_to_feed == 1 and not request.num_pending:
                made[request.id] = self._draft(request.tokens.tolist(), request.seed, depth)
        return made

    def _draft(self, tokens: list[int], seed: int, depth: int) -> Draft:
        if self.rng.random() < 0.2:
            return Draft(depth)
        start = len(tokens)
        if self.rng.random() < 0.3:
            return self._tree(tokens, seed, depth)
        for _ in range(depth):
            is_wrong = self.rng.random() < 0.15
            tokens.append((oracle_next(tokens, seed) + is_wrong) % VOCAB)
        return Draft(depth, tuple(tokens[start:]))

    def _tree(self, tokens: list[int], seed: int, num: int) -> Draft:
        parents = tuple(self.rng.choice((node, self.rng.randint(0, node))) for node in range(num))
        drafts: list[int] = []
        for path in paths_of(parents)[1:]:
            before = [*tokens, *(drafts[node - 1] for node in path[:-1])]
            is_wrong = self.rng.random() < 0.3
            drafts.append((oracle_next(before, seed) + is_wrong) % VOCAB)
        return Draft(num, tuple(drafts), parents)

    def awaits_results(self, scheduler: Scheduler) -> bool:
        return not scheduler.config.waits_for_draws and self.rng.random() < 0.5

    def marked(self, plan: StepPlan) -> StepPlan:
        return plan

    def learn(self, plan: StepPlan, events: list[TokenEvent], took: Took) -> None:
        self.num_drafted += sum(event.num_drafted for event in events)
        self.num_accepted += sum(event.num_accepted for event in events)
