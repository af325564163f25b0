"""Measuring processes, in our own Python or in the one that has a peer.

Another Python gets a folder with nothing but a link to our package on its path: what is installed
beside the package stays out of its sight.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import quire
from quire.bench.cpu.engines import ENGINES
from quire.bench.cpu.work import Sizes
from quire.bench.startup import ChildFailed, child_records

MODULE = "quire.bench.cpu.child"


class Children:
    def __init__(self, threads: int, sizes: Sizes) -> None:
        self.threads, self.sizes = threads, sizes
        self._folder = tempfile.TemporaryDirectory(prefix="quire-package-")
        Path(self._folder.name, "quire").symlink_to(Path(quire.__file__).parent)

    def close(self) -> None:
        self._folder.cleanup()

    def version(self, engine: str, python: str | None) -> str | None:
        """None: not installed there."""
        found = self._ask({"engine": engine}, python).get("version")
        return None if found is None else str(found)

    def measure(
        self, engine: str, workload: str, model: str, seed: int, python: str | None
    ) -> dict[str, float]:
        """Figures by metric; raises ChildFailed. A start is timed from here."""
        task = {
            "engine": engine,
            "workload": workload,
            "model": model,
            "seed": seed,
            "threads": self.threads,
            "sizes": asdict(self.sizes),
        }
        start = time.perf_counter()
        found = self._ask(task, python)
        if workload == "cold":
            return {"first_token_s": found.pop("answered_at") - start, **found}
        found.pop("answered_at")
        return found

    def _ask(self, task: dict[str, Any], python: str | None) -> dict[str, Any]:
        variables = {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        variables |= ENGINES[task["engine"]].variables
        if python is None:
            records = child_records(MODULE, task, variables)
        else:
            variables["PYTHONPATH"] = self._folder.name
            records = child_records(MODULE, task, variables, python)
        answer: dict[str, Any] | None = None
        for record in records:
            answer = {**record, "answered_at": time.perf_counter()}
        if answer is None:
            raise ChildFailed(f"{task['engine']} ended without a figure", [])
        return answer
