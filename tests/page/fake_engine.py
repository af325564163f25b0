"""FakeEngine: numbers that move like an engine's, for the page to draw.

It keeps a pool of pages, a line of requests that share a first part of their prompt, and feeds
them within a budget of tokens per step. Nothing is computed; only the snapshots have to be
consistent (a page has one owner, lanes hold the pages the grid shows). The real ones come from the
server; their shape is what the tests of the page and of the server agree on.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

Snapshot = dict[str, Any]

PAGE_SIZE = 16
SHARED_PAGES = 12
BUDGET = 128
TOPICS = ["how paper is made", "why quires are sewn", "what an index is for", "old maps"]


@dataclass
class Visitor:
    id: int
    prompt: int
    answer: int
    cached: int
    arrived: int
    computed: int = 0
    fed: int = 0
    was_reading: bool = True  # in the last step
    pages: list[int] = field(default_factory=list)

    @property
    def is_reading(self) -> bool:
        return self.computed < self.prompt

    @property
    def output(self) -> int:
        return max(0, self.computed - self.prompt + 1)


@dataclass
class FakeEngine:
    num_pages: int = 512
    pages_per_cell: int = 1
    max_running: int = 9
    has_speculation: bool = True
    windows: tuple[int | None, ...] = (None,)
    experts: Snapshot | None = None
    places: tuple[Snapshot, ...] = ()
    seed: int = 3
    step: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.free = list(range(SHARED_PAGES, self.num_pages))
        self.random.shuffle(self.free)
        self.cached: deque[int] = deque()
        self.running: list[Visitor] = []
        self.waiting: deque[Visitor] = deque()
        self.next_id = 1
        self.num_finished = 0
        self.num_output = 0

    def advance(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            if self.random.random() < 0.14 and len(self.waiting) < 6:
                self.arrive()
            while self.waiting and len(self.running) < self.max_running:
                self.running.append(self.waiting.popleft())
            self.feed()

    def arrive(self) -> None:
        own = self.random.choice([20, 60, 140, 400])
        cached = 0 if self.next_id == 1 else SHARED_PAGES * PAGE_SIZE
        prompt = SHARED_PAGES * PAGE_SIZE + own
        answer = self.random.randint(30, 160)
        visitor = Visitor(self.next_id, prompt, answer, cached, self.step, computed=cached)
        self.waiting.append(visitor)
        self.next_id += 1

    def feed(self) -> None:
        left = BUDGET
        for visitor in sorted(self.running, key=lambda one: one.is_reading):
            want = visitor.prompt - visitor.computed if visitor.is_reading else 1
            visitor.was_reading = visitor.is_reading
            visitor.fed = min(want, left, 64)
            left -= visitor.fed
            visitor.computed += visitor.fed
            own_pages = -(-visitor.computed // PAGE_SIZE) - SHARED_PAGES
            while len(visitor.pages) < own_pages:
                visitor.pages.append(self.free.pop() if self.free else self.cached.popleft())
            if visitor.output >= visitor.answer:
                self.finish(visitor)

    def finish(self, visitor: Visitor) -> None:
        self.running.remove(visitor)
        self.num_finished += 1
        self.num_output += visitor.output
        self.cached.extend(visitor.pages[:-1])
        self.free.extend(visitor.pages[-1:])

    def cells(self) -> list[int]:
        cells = [0] * self.num_pages
        for page in range(SHARED_PAGES):
            cells[page] = -2 if len(self.running) > 1 else -1
        for page in self.cached:
            cells[page] = -1
        for visitor in self.running:
            for page in visitor.pages:
                cells[page] = visitor.id
        return cells

    def tree(self) -> list[Snapshot]:
        trunk = {
            "id": 1,
            "parent": 0,
            "pages": SHARED_PAGES,
            "tokens": SHARED_PAGES * PAGE_SIZE,
            "hits": self.next_id,
            "live": len(self.running),
            "text": "You are the librarian of a small town library, patient and exact.",
        }
        branches = []
        for visitor in self.running:
            pages = min(len(visitor.pages), (visitor.prompt // PAGE_SIZE) - SHARED_PAGES)
            if pages > 0:
                branch: Snapshot = {"id": 100 + visitor.id, "parent": 1, "pages": pages, "live": 1}
                branch |= {"tokens": pages * PAGE_SIZE, "hits": visitor.id % 3}
                if visitor.id % 4:
                    topic = TOPICS[visitor.id % len(TOPICS)]
                    branch["text"] = f"Please tell me about {topic}, from the start."
                branches.append(branch)
        kept = {"id": 7, "parent": 1, "pages": 9, "tokens": 144, "hits": 2, "live": 0}
        return [trunk, kept | {"text": "What are the opening hours"}, *branches]

    def snapshot(self) -> Snapshot:
        cells = self.cells()
        num_cached = cells.count(-1)
        num_free = cells.count(0)
        return {
            "t": self.step * 0.05,
            "model": "mock-model",
            "uptime_s": 99.1 + self.step * 0.05,
            "ready": True,
            "step": self.step,
            "step_ms": 11.0 + self.step % 7,
            "pool": {
                "page_size": PAGE_SIZE,
                "num_pages": self.num_pages * self.pages_per_cell,
                "pages_per_cell": self.pages_per_cell,
                "windows": list(self.windows),
                "cells": cells,
            },
            "tree": self.tree(),
            "lanes": [self.lane(row, visitor) for row, visitor in enumerate(self.running)],
            "waiting": [self.waiter(visitor) for visitor in self.waiting],
            "num_waiting": len(self.waiting),
            "limits": {"max_num_seqs": 16, "max_num_batched_tokens": BUDGET, "max_model_len": 8192},
            "counts": {
                "num_running": len(self.running),
                "num_waiting": len(self.waiting),
                "num_steps": self.step,
                "num_fed_tokens": self.step * 40,
                "num_output_tokens": self.num_output,
                "num_preempted": 0,
                "num_finished": self.num_finished,
                "pages_total": self.num_pages,
                "pages_live": self.num_pages - num_cached - num_free,
                "pages_cached": num_cached,
                "pages_empty": num_free,
                "pages_evicted": 0,
                "pages_copied": 0,
                "slots_wasted": 7 * len(self.running),
                "prefix_query_tokens": 350 * self.next_id,
                "prefix_hit_tokens": 192 * (self.next_id - 1),
            },
            "places": list(self.places),
            "api": self.api(),
            "spec": {
                "proposer": "ngram",
                "drafted": 1000,
                "accepted": 640,
                "seconds": 1.24,
                "by_position": [0.81, 0.62, 0.43],
            }
            if self.has_speculation
            else None,
        }

    def api(self) -> Snapshot:
        le = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0]
        pauses = [0.002, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25]
        speed = 18.0 * len(self.running) + 25 * abs((self.step % 120) - 60) / 60
        return {
            "tokens_per_s": speed,
            "prompt_tokens_per_s": 410.0,
            "open_streams": len(self.running),
            "ttft": {"le": le, "counts": [0, 1, 4, 9, 14, 6, 2, 1, 0, 0]},
            "itl": {"le": pauses, "counts": [0, 3, 40, 220, 130, 31, 8, 2, 0]},
            "experts": self.experts,
        }

    def lane(self, row: int, visitor: Visitor) -> Snapshot:
        return {
            "id": visitor.id,
            "row": row,
            "prompt": visitor.prompt,
            "computed": visitor.computed,
            "known": max(visitor.prompt, visitor.computed + 1),
            "output": visitor.output,
            "fed": visitor.fed,
            "drafted": 0 if visitor.was_reading or not self.has_speculation else 4,
            "accepted": 0 if visitor.was_reading or not self.has_speculation else 2,
            "kind": "prefill" if visitor.was_reading else "decode",
            "cached": visitor.cached,
            "pages": SHARED_PAGES + len(visitor.pages),
            "priority": 0,
            "preempted": 0,
        }

    def waiter(self, visitor: Visitor) -> Snapshot:
        waited = 0.05 * (self.step - visitor.arrived)
        return {"id": visitor.id, "prompt": visitor.prompt, "waited_s": waited, "priority": 0}
