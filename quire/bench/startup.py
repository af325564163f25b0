"""Start-up: from a fresh process to the first token, and where the time goes.

The parent starts `python -m quire.bench.startup` and stops the clock when the line with the first
token arrives; the child reports how long importing, building and generating took of that. The one
place of `bench` that starts processes: `child_records` runs any module that prints JSON lines.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire.errors import QuireError

TRACE_LINES = 40


class ChildFailed(QuireError):
    """A measuring process failed; `trace` is the end of its output."""

    def __init__(self, message: str, trace: list[str]) -> None:
        super().__init__(message)
        self.trace = trace


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
    runs = [start_once(model, options) for _ in range(repeats)]
    middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return Startup(**middle, repeats=repeats)


def start_once(
    model: str, options: dict[str, Any], kernels: Path | None = None
) -> dict[str, float]:
    """One fresh process. `kernels` is the folder its compiled Triton kernels are kept in."""
    found: dict[str, float] = {}
    start = time.perf_counter()
    variables = {} if kernels is None else {"TRITON_CACHE_DIR": str(kernels)}
    task = {"model": model, **options}
    for phases in child_records("quire.bench.startup", task, variables):
        found = {"total": time.perf_counter() - start, **phases}
    if not found:
        raise ChildFailed("the measured process ended without a token", [])
    return found


def child_records(
    module: str,
    task: dict[str, Any],
    variables: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Iterator[dict[str, Any]]:
    """The JSON lines that `python -m module TASK` prints, as they come; `variables` are added to
    its environment.

    Raises ChildFailed with the end of its output, after the last line, if the process fails.
    """
    command = [python, "-m", module, json.dumps(task)]
    if variables:
        command = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
    with tempfile.TemporaryFile() as complaints:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=complaints, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("{"):  # libraries print what they like
                    yield json.loads(line)
        if child.returncode != 0:
            complaints.seek(0)
            said = complaints.read().decode(errors="replace").strip().splitlines()
            last = said[-1] if said else f"exit code {child.returncode}"
            raise ChildFailed(f"the measured process failed: {last}", said[-TRACE_LINES:])


def _child(options: dict[str, Any]) -> None:
    begin = time.perf_counter()
    from quire.bench.offline import greedy
    from quire.engine import build  # noqa: F401  # torch comes with it
    from quire.llm import LLM

    imported = time.perf_counter()
    llm = LLM(**options, skip_tokenizer_init=True)
    built = time.perf_counter()
    llm.generate({"prompt_token_ids": list(range(32))}, greedy(1), use_tqdm=False)
    done = time.perf_counter()
    phases = {
        "importing": imported - begin,
        "building": built - imported,
        "first_token": done - built,
    }
    print(json.dumps(phases), flush=True)


if __name__ == "__main__":
    _child(json.loads(sys.argv[1]))
