"""Small real stand-ins for the tests: no mocks.

`PageContentRunner` keeps the *content* of every page and refuses to answer unless each request's
page table spells exactly that request's tokens. A green run means scheduler, allocator, prefix
tree, copy-on-write, preemption and chunking agree about memory, not only about output.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.kv.allocator import SCRATCH_PAGE
from quire.step import StepPlan, StepResult

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
    def __init__(self, num_pages: int, page_size: int, max_rows: int, max_pages: int) -> None:
        self.page_size = page_size
        self.pages: list[list[tuple[int, int] | None]] = [
            [None] * page_size for _ in range(num_pages)
        ]
        self.tokens: list[list[int]] = [[] for _ in range(max_rows)]
        self.tables: list[list[int]] = [[SCRATCH_PAGE] * max_pages for _ in range(max_rows)]
        self.seeds = [0] * max_rows
        self.num_copied = 0

    def execute(self, plan: StepPlan) -> Ready:
        for a in plan.admissions:
            self.tokens[a.row] = list(a.tokens)
            self.seeds[a.row] = a.seed
        targets = [c.target for c in plan.page_copies]
        assert len(set(targets)) == len(targets), "two copies into one page"
        contents = [list(self.pages[c.source]) for c in plan.page_copies]
        for copy, content in zip(plan.page_copies, contents, strict=True):
            self.pages[copy.target] = content
            self.num_copied += 1
        for write in plan.page_writes:
            self.tables[write.row][write.column] = write.page
        for work in plan.works:  # all writes first, as one fused forward does
            assert work.num_tokens > 0, "a forward needs at least one query token"
            for position in range(work.start, work.start + work.num_tokens):
                page = self.tables[work.row][position // self.page_size]
                assert page != SCRATCH_PAGE, "wrote to the scratch page"
                token = self.tokens[work.row][position]
                self.pages[page][position % self.page_size] = (position, token)
        sampled = [self._read_and_draw(work) for work in plan.works]
        return Ready(StepResult(sampled))

    def _read_and_draw(self, work) -> tuple[int, ...]:
        end = work.start + work.num_tokens
        seen = []
        for position in range(end):
            entry = self.pages[self.tables[work.row][position // self.page_size]][
                position % self.page_size
            ]
            assert entry is not None, f"position {position} was never written"
            assert entry[0] == position, f"page holds position {entry[0]}, want {position}"
            seen.append(entry[1])
        assert seen == self.tokens[work.row][:end], "pages spell other tokens than the request's"
        if not work.sample:
            return ()
        token = oracle_next(seen, self.seeds[work.row])
        self.tokens[work.row].append(token)  # the device row knows it before the host does
        assert len(self.tokens[work.row]) == end + 1
        return (token,)
