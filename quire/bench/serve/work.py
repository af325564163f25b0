"""The work of a load test: who asks when, for how much. Everything follows from the seed.

An open loop sends at times that do not depend on the answers: a Poisson process, alone or in
bursts, or a trace file. A closed loop has no times: a fixed number of clients send one request
behind another. Prompts are text of common short words, about one token each in any vocabulary; what
the server counted is in the report. `drive.py` sends them.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quire.bench.workload import Span
from quire.errors import BadRequest

WORDS = (
    *("the", "of", "and", "to", "in", "is", "was", "for", "that", "on", "with", "as", "by", "at"),
    *("from", "it", "an", "be", "this", "which", "or", "are", "not", "but", "had", "his", "they"),
    *("one", "all", "new", "first", "two", "time", "other", "more", "after", "year", "people"),
    *("work", "over", "world", "life", "part", "city", "many", "while", "house", "water", "long"),
    *("line", "found", "being", "small", "number", "used", "still", "light", "hand", "high"),
)
# Tokens of the first question and the first answer of 10,619 conversations of ShareGPT V3 (at least
# 4 tokens each, questions up to 1,024, both up to 2,048): every 20th part, and 99 % as the last.
SHAREGPT_PROMPTS = (
    *(4, 8, 11, 13, 17, 21, 27, 36, 50, 75, 110),
    *(165, 228, 286, 338, 391, 459, 551, 666, 813, 959),
)
SHAREGPT_OUTPUTS = (
    *(4, 8, 11, 15, 20, 27, 37, 52, 76, 105, 141),
    *(184, 220, 257, 294, 334, 378, 435, 529, 703, 937),
)


class Quantiles(NamedTuple):
    """Lengths by evenly spaced quantiles, straight lines between them."""

    points: tuple[int, ...]

    def draw(self, rng: random.Random) -> int:
        place = rng.random() * (len(self.points) - 1)
        below = int(place)
        low, high = self.points[below], self.points[below + 1]
        return round(low + (place - below) * (high - low))


class Lengths(NamedTuple):
    prompts: Span | Quantiles
    outputs: Span | Quantiles


SHAREGPT = Lengths(Quantiles(SHAREGPT_PROMPTS), Quantiles(SHAREGPT_OUTPUTS))


@dataclass(frozen=True, slots=True)
class Ask:
    """One request; `at` is when it is meant to be sent, in seconds from the start."""

    at: float
    prompt: str
    num_prompt: int  # words; the server counts tokens
    num_output: int


def asks(times: list[float], sizes: list[tuple[int, int]], seed: int, shared: int = 0) -> list[Ask]:
    """Prompts differ from their first word behind the `shared` ones, which all begin with."""
    rng = random.Random(f"{seed} words")
    prefix = [rng.choice(WORDS) for _ in range(shared)]
    made = []
    for number, (at, (num_prompt, num_output)) in enumerate(zip(times, sizes, strict=True)):
        own = [str(number), *(rng.choice(WORDS) for _ in range(num_prompt - shared - 1))]
        text = " ".join([*prefix, *own])
        made.append(Ask(at, text, max(num_prompt, shared + 1), num_output))
    return made


def drawn_sizes(count: int, lengths: Lengths, seed: int) -> list[tuple[int, int]]:
    rng = random.Random(f"{seed} lengths")
    return [(lengths.prompts.draw(rng), lengths.outputs.draw(rng)) for _ in range(count)]


def poisson_times(count: int, rate: float, burst: int, seed: int) -> list[float]:
    """`rate` requests a second in the mean; with `burst`, so many at a time, so much more rarely.

    >>> [round(t, 3) for t in poisson_times(4, 10.0, 2, seed=0)]
    [0.0, 0.0, 0.183, 0.183]
    """
    rng, now, times = random.Random(f"{seed} times"), 0.0, list[float]()
    while len(times) < count:
        times += [now] * burst
        now += rng.expovariate(rate / burst)
    return times[:count]


class Trace(NamedTuple):
    times: list[float]
    sizes: list[tuple[int, int]]


def read_trace(path: Path, most: int | None) -> Trace:
    """A line of JSON for each request: {"at": seconds, "prompt": tokens, "output": tokens}.

    Mooncake's names are understood too: timestamp (milliseconds), input_length, output_length.
    """
    entries = sorted(_trace_lines(path))[:most]
    if not entries:
        raise BadRequest(f"--trace {path} holds no request")
    begun = entries[0][0]
    return Trace([at - begun for at, _, _ in entries], [(p, o) for _, p, o in entries])


def _trace_lines(path: Path) -> Iterator[tuple[float, int, int]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"--trace {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            at = entry["at"] if "at" in entry else entry["timestamp"] / 1e3
            prompt = entry["prompt"] if "prompt" in entry else entry["input_length"]
            output = entry["output"] if "output" in entry else entry["output_length"]
            made = float(at), int(prompt), int(output)
        except (ValueError, KeyError, TypeError) as error:
            raise BadRequest(f"--trace {path}, line {number}: {error!r}; want {_WANTED}") from None
        if not (0 <= made[0] < float("inf") and made[1] >= 1 and made[2] >= 1):
            raise BadRequest(f"--trace {path}, line {number}: got {made}, want {_WANTED}")
        yield made


_WANTED = '{"at": seconds, "prompt": tokens, "output": tokens}'


def busiest_second(times: list[float]) -> int:
    """Most requests meant for any one second: what the client has to be able to send."""
    return max(bisect_right(times, at + 1.0) - index for index, at in enumerate(times))
