"""Start-up: from a fresh process to the first token, and where the time goes.

The parent starts `python -m quire.bench.startup` and stops the clock when the line with the first
token arrives; the child reports how long importing, building and generating took of that.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from quire.errors import QuireError


@dataclass(frozen=True, slots=True)
class Startup:
    """Medians over the repeats, in seconds."""

    total: float  # process start to first token
    importing: float
    building: float  # weights, page pool, graphs
    first_token: float
    repeats: int

    def as_dict(self) -> dict[str, Any]:
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


def measure_startup(model: str, options: dict[str, Any], repeats: int = 3) -> Startup:
    runs = [_run_child(model, options) for _ in range(repeats)]
    middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return Startup(**middle, repeats=repeats)


def _run_child(model: str, options: dict[str, Any]) -> dict[str, float]:
    command = [sys.executable, "-m", "quire.bench.startup", json.dumps({"model": model, **options})]
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        line = child.stdout.readline()
        total = time.perf_counter() - start
        reason = child.stderr.read()
    if not line:
        last = (reason.strip().splitlines() or ["no reason given"])[-1]
        raise QuireError(f"the measured process gave no token: {last}")
    return {"total": total, **json.loads(line)}


def _child(options: dict[str, Any]) -> None:
    begin = time.perf_counter()
    from quire.bench.offline import greedy
    from quire.engine import build  # noqa: F401  # torch comes with it
    from quire.llm import LLM

    imported = time.perf_counter()
    llm = LLM(**options, skip_tokenizer_init=True)
    built = time.perf_counter()
    llm.generate({"prompt_token_ids": list(range(16))}, greedy(1), use_tqdm=False)
    done = time.perf_counter()
    phases = {
        "importing": imported - begin,
        "building": built - imported,
        "first_token": done - built,
    }
    print(json.dumps(phases), flush=True)


if __name__ == "__main__":
    _child(json.loads(sys.argv[1]))
