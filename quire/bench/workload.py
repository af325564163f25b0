"""Workloads: what is asked of an engine. Random token ids, lengths drawn from a seeded generator.

Texts would bring a tokenizer into the measurement, and answers would end at different lengths. With
ids and fixed output lengths every run of every engine does the same work.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from quire.errors import BadRequest


class Span(NamedTuple):
    """Lengths from low to high, both included."""

    low: int
    high: int

    @staticmethod
    def parse(text: str) -> Span:
        """'64-256', or '128' for one length.

        >>> Span.parse("64-256"), Span.parse("8")
        (Span(low=64, high=256), Span(low=8, high=8))
        """
        low, _, high = text.partition("-")
        try:
            span = Span(int(low), int(high or low))
        except ValueError:
            span = Span(0, 0)
        if not 1 <= span.low <= span.high:
            raise BadRequest(f"got lengths {text!r}, want a number or a span such as 64-256")
        return span

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a prompt, and how many tokens to make of it."""

    prompt: tuple[int, ...]
    num_output: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.num_output


def random_tokens(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab_size) for _ in range(count))


def random_jobs(
    count: int, prompts: Span, outputs: Span, vocab_size: int, seed: int = 0
) -> list[Job]:
    rng = random.Random(seed)
    lengths = [(prompts.draw(rng), outputs.draw(rng)) for _ in range(count)]
    return [Job(random_tokens(rng, p, vocab_size), o) for p, o in lengths]


def skewed_jobs(count: int, max_len: int, vocab_size: int, seed: int = 0) -> list[Job]:
    """Jobs from which every technique of the ladder gains, scaled to contexts of `max_len` tokens.

    All prompts share a prefix of max_len / 4 (a system prompt). Every eighth brings a long text of
    its own; every fourth answer is about five times as long as the others.
    """
    rng = random.Random(seed)
    prefix = random_tokens(rng, max(1, max_len // 4), vocab_size)
    own, long_own = Span(max(1, max_len // 32), max_len // 8), Span(max_len // 4, max_len * 3 // 8)
    short, long = Span(max(1, max_len // 64), max_len // 21), Span(max_len // 8, max_len * 3 // 16)
    jobs = []
    for index in range(count):
        extra = (long_own if index % 8 == 5 else own).draw(rng)
        outputs = (long if index % 4 == 3 else short).draw(rng)
        jobs.append(Job(prefix + random_tokens(rng, extra, vocab_size), outputs))
    rng.shuffle(jobs)
    return jobs


def spread(jobs: list[Job], count: int) -> list[int]:
    """Indices of `count` jobs that stand for all: evenly spaced in the order of their length."""
    order = sorted(range(len(jobs)), key=lambda i: jobs[i].num_tokens)
    step = len(jobs) / count
    return sorted(order[int((i + 0.5) * step)] for i in range(count))


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of all values do not exceed (nearest rank)."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]
