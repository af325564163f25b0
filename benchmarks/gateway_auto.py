"""A small and a large model on questions whose right answers are known, and four ways to choose.

Both answer every question with one of its choices, greedily. From half of the questions a route is
learned (`quire route fit`); on the other half the small model alone, the large one alone, the route
and the route with the cascade take turns, each by real requests.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from quire.evaluate.tasks import Item, read_items
from quire.load.known_texts import CHOICES
from tests.e2e.harness import Served

SMALL, LARGE = "smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"
TASKS = ("arc-easy", "sciq", "piqa")
ARMS = ("small", "large", "route", "route + cascade")


class Answered(NamedTuple):
    is_right: bool
    seconds: float
    mean_logprob: float
    who: str  # which model answered
    reason: str


def question(item: Item) -> dict[str, Any]:
    return {
        "prompt": item.context,
        "structured_outputs": {"choice": list(item.choices)},
        "max_tokens": 96,
        "temperature": 0,
        "logprobs": 0,
    }


def ask(served: Served, item: Item, model: str, salt: str) -> Answered:
    """No two arms share a cached prompt."""
    body = question(item) | {"model": model, "cache_salt": salt}
    request = urllib.request.Request(
        f"{served.url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    begun = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as answer:
        found = json.loads(answer.read())
        route = answer.headers.get("x-quire-route", "")
    seconds = time.perf_counter() - begun
    choice = found["choices"][0]
    mean = statistics.fmean(choice["logprobs"]["token_logprobs"])
    reason = next((p.strip()[7:] for p in route.split(";") if "reason=" in p), "")
    is_right = choice["text"] == item.choices[item.gold]
    return Answered(is_right, seconds, mean, found["model"], reason)


@contextmanager
def serving(folder: Path, name: str, auto: str = "") -> Iterator[Served]:
    path = folder / f"{name}.toml"
    path.write_text(
        f'[models.small]\nmodel = "{SMALL}"\n\n[models.large]\nmodel = "{LARGE}"\n\n{auto}'
    )
    with Served(path, "--max-model-len", "2048") as served:
        for model in ("small", "large"):
            served.complete("hello", model=model)
        yield served


def learn(folder: Path, served: Served, items: Sequence[Item]) -> dict[str, Any]:
    """The route, and what `quire route fit` says of it."""
    lines = []
    for item in items:
        small, large = (ask(served, item, model, "learn") for model in ("small", "large"))
        scores = {"small_score": float(small.is_right), "large_score": float(large.is_right)}
        lines.append(question(item) | scores | {"small_mean_logprob": small.mean_logprob})
    examples = folder / "examples.jsonl"
    examples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [sys.executable, "-m", "quire", "route", "fit", str(examples), "--json"]
    words += ["--out", str(folder / "route.json")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def arm_of(found: Sequence[Answered]) -> dict[str, Any]:
    share = statistics.fmean(one.is_right for one in found)
    return {
        "right": round(share, 3),
        "error": round(math.sqrt(share * (1 - share) / len(found)), 3),
        "to_large": round(statistics.fmean(one.who == "large" for one in found), 3),
        "escalated": sum(one.reason == "escalated" for one in found),
        "mean_s": round(statistics.fmean(one.seconds for one in found), 3),
        "median_s": round(statistics.median(one.seconds for one in found), 3),
    }


def choose(num_learned: int, num_judged: int) -> dict[str, Any]:
    path = CHOICES.fetch(lambda *_: None)
    each = -(-(num_learned + num_judged) // len(TASKS))
    items = [item for task in TASKS for item in read_items(path, task, each)]
    order = [at for turn in range(each) for at in range(turn, len(items), each)]  # tasks in turn
    learned = [items[at] for at in order[:num_learned]]
    judged = [items[at] for at in order[num_learned : num_learned + num_judged]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(folder, "plain") as served:
            about = learn(folder, served, learned)
        auto = '[auto]\nsmall = "small"\nlarge = "large"\nroute = "route.json"\n'
        cascade = auto + "\n[auto.cascade]\ntokens = 32\n"
        if about["cascade"] is None:  # too few answers for a limit of its own
            cascade += "mean_logprob = -1.0\n"
        arms: dict[str, list[Answered]] = {arm: [] for arm in ARMS}
        with serving(folder, "a", auto) as first, serving(folder, "b", cascade) as second:
            places = ((first, "small"), (first, "large"), (first, "auto"), (second, "auto"))
            for at, item in enumerate(judged):
                for turn in range(len(ARMS)):
                    number = (at + turn) % len(ARMS)
                    served, model = places[number]
                    arms[ARMS[number]].append(ask(served, item, model, ARMS[number]))
    told = {k: about[k] for k in ("auc", "suffices", "gap_recovered", "calibration_error")}
    told["threshold"] = about["chosen"]["threshold"]
    return {
        "small": SMALL,
        "large": LARGE,
        "learned_from": len(learned),
        "judged_on": len(judged),
        "route": told | {"cascade": about["cascade"]},
        "arms": {arm: arm_of(found) for arm, found in arms.items()},
    }
