"""One engine, one workload, one process: `python -m quire.bench.cpu.child TASK`.

A task without a workload only asks whether the engine is there. Prints one JSON line.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
from typing import Any

from quire.bench.cpu.engines import ENGINES
from quire.bench.cpu.work import WORKLOADS, Prompter, Sizes, setup_of


def look(engine: str) -> dict[str, Any]:
    """{"version": ...} of an engine that this Python can run, {} otherwise."""
    kind = ENGINES[engine]
    if kind.program:
        return {"version": ""} if shutil.which(kind.program) else {}
    try:
        return {"version": importlib.metadata.version(kind.package)}
    except importlib.metadata.PackageNotFoundError:
        return {}


def measure(task: dict[str, Any]) -> dict[str, float]:
    workload, sizes = task["workload"], Sizes(**task["sizes"])
    setup = setup_of(workload, task["model"], task["threads"], sizes)
    peer = ENGINES[task["engine"]].open(setup)
    return WORKLOADS[workload](peer, sizes, Prompter(task["seed"]))


def main() -> None:
    task = json.loads(sys.argv[1])
    print(json.dumps(measure(task) if "workload" in task else look(task["engine"])), flush=True)


if __name__ == "__main__":
    main()
