"""CPU time that serving adds in the engine process: each step's tokens told to the API processes.

What offline use does not have: looking up whose tokens they are, encoding them, and a thread that
writes them to a socket. Steps are 3 ms apart, as on a GPU, and `cat` is the API process.

    python -m benchmarks.report_cpu --streams 1 16 64 256 --api-processes 2
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from quire.engine.peer import ID_BITS, Peer
from quire.engine.process import EngineProcess, Patience
from quire.params import SamplingParams
from quire.request import Request
from quire.step import TokenEvent
from tests.unit.case import Case

STEP_S = 0.003


def step_cost(process: EngineProcess, num_streams: int, num_steps: int) -> float:
    """Seconds of CPU, of all threads, for one step of that many streams."""
    numbers = list(process._peers)
    ids = [(numbers[i % len(numbers)] << ID_BITS) + i for i in range(num_streams)]
    requests = [Request.new(id, [1, 2, 3], SamplingParams(max_tokens=1 << 20)) for id in ids]
    for request in requests:
        request.tokens.extend((5, 5))  # past its first token
    process._requests = {request.id: request for request in requests}
    spent = 0.0
    for _ in range(num_steps):
        events = [TokenEvent(request.id, (5,)) for request in requests]  # offline makes them too
        begun = time.process_time()
        process._report(events)
        time.sleep(STEP_S)  # the writer thread writes meanwhile
        spent += time.process_time() - begun
    return spent / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--api-processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200, help="in a round")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    engine: Any = SimpleNamespace(core=Case().core, tiers=None)
    readers = []
    with tempfile.TemporaryDirectory() as folder:
        patience = Patience(60.0, 60.0, 60.0)
        process = EngineProcess(engine, Path(folder) / "engine.sock", 0.0, patience)
        for number in range(args.api_processes):
            ours, theirs = socket.socketpair()
            readers.append(subprocess.Popen(["cat"], stdin=theirs, stdout=subprocess.DEVNULL))
            process._peers[number] = Peer(ours, lambda: None, number)
        for num_streams in args.streams:
            costs = [step_cost(process, num_streams, args.steps) for _ in range(args.rounds)]
            found = {
                "streams": num_streams,
                "api_processes": args.api_processes,
                "engine_us_per_step": round(min(costs) * 1e6, 1),
                "engine_us_per_token": round(min(costs) / num_streams * 1e6, 2),
            }
            print(json.dumps(found), flush=True)
    for reader in readers:
        reader.kill()
        reader.wait()


if __name__ == "__main__":
    main()
