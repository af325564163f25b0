"""What suffix matching costs the host in a step: microseconds for all requests of a batch.

Requests write a token each, and every one is asked for drafts after it, as in a step that looks at
all of them. In "matching" each repeats a text of its own with an edit now and then, in "strange"
tokens are drawn from a large vocabulary and hardly ever come again; "answers" has 64 recent answers
under the same salt besides. "step" is all that the policy does before a step (`Speculation.make`),
with looks that become rare where nothing is found. Processor time of one thread. Prints a JSON line
a row.

    python -m benchmarks.suffix_host
    python -m benchmarks.suffix_host --requests 1 32 256 --profile
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from quire.params import SamplingParams
from quire.request import Request, RequestId
from quire.spec.speculation import Limits, Speculation
from quire.spec.suffix import Suffix
from quire.speculative import parse_speculative

PROMPT, VOCAB, MOST = 400, 50_000, 16
EDITED = 0.04  # of the tokens of a text that is written again
ANSWERS = 64


class Crowd:
    """Requests that decode, and as much of a scheduler as the policy looks at."""

    def __init__(self, kind: str, count: int) -> None:
        self.rng, self.is_matching = random.Random(7), kind != "strange"
        self.running = {RequestId(i): self._request(i) for i in range(count)}

    def _request(self, id: int) -> Request:
        prompt = [self.rng.randrange(VOCAB) for _ in range(PROMPT)]
        return Request.new(id, prompt, SamplingParams(max_tokens=4 * PROMPT), seed=id)

    def write(self) -> None:
        """A token each."""
        for request in self.running.values():
            tokens = request.tokens
            token = tokens[len(tokens) - PROMPT]
            if not self.is_matching or self.rng.random() < EDITED:
                token = self.rng.randrange(VOCAB)
            tokens.append(token)
            request.num_computed = len(tokens) - 1

    def max_drafts(self, request: Request) -> int:
        return MOST


def proposer(kind: str) -> Suffix:
    made, rng = Suffix(parse_speculative({"method": "suffix"})), random.Random(3)
    for id in range(ANSWERS if kind == "answers" else 0):
        ended = Request.new(-1 - id, [1], SamplingParams(max_tokens=PROMPT), seed=id)
        ended.tokens.extend(rng.randrange(VOCAB) for _ in range(PROMPT))
        made.forget(ended)
    return made


def asks(kind: str, crowd: Crowd) -> Callable[[], object]:
    suffix = proposer(kind)

    def ask() -> None:
        for request in crowd.running.values():
            suffix.propose(request, MOST)

    return ask


def makes(kind: str, crowd: Crowd) -> Callable[[], object]:
    policy: Any = Speculation(proposer(kind), Limits(MOST), None)
    return lambda: policy.make(crowd)


def measure(kind: str, count: int, what: str, steps: int) -> dict[str, Any]:
    crowd = Crowd(kind, count)
    run = (asks if what == "propose" else makes)(kind, crowd)
    run()  # prompts are read
    spent = []
    for _ in range(steps):
        crowd.write()
        begun = time.process_time_ns()
        run()
        spent.append((time.process_time_ns() - begun) / 1e3)
    row = {"row": what, "kind": kind, "requests": count}
    mean = sum(spent) / len(spent)
    return row | {"us_a_step": round(median(spent), 1), "mean_us": round(mean, 1)}


def rows_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for what in ("propose", "step"):
        for kind in ("matching", "strange", "answers"):
            for count in options.requests:
                yield measure(kind, count, what, options.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="where the time goes, at last")
    options = parser.parse_args()
    for row in rows_of(options):
        print(json.dumps(row), flush=True)
    if options.profile:
        with cProfile.Profile() as profile:
            measure("matching", max(options.requests), "propose", options.steps)
        pstats.Stats(profile).sort_stats("tottime").print_stats(16)


if __name__ == "__main__":
    main()
