"""`quire serve` under streaming clients beside the same work offline, one GPU, random weights.

    python -m benchmarks.gpu_served 8b 0.6b
    python -m benchmarks.gpu_served 8b --loads 64x128x256 --flags "--target-gap-ms 30"
    python -m benchmarks.gpu_served 8b --rehearse         # a tiny model, on any machine

A load is clients x tokens of prompt x tokens of answer, in a closed loop of `--rounds` requests a
client. `offline` is `LLM.generate` of as many requests as there are clients, the better of two.
Clients are processes of their own on the same host. Prints one JSON line a shape: tokens a second
of both and their ratio, first tokens and gaps in milliseconds, cores that each process of the
server used, and what the server compiled or captured after it was ready, which should be nothing.
Run from the repository root, with the server's packages and psutil on the path.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import string
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from quire.bench.serve.client import Outcome, Target
from quire.bench.serve.drive import closed_loop
from quire.bench.serve.figures import figures
from quire.bench.serve.work import Ask
from quire.bench.shapes import SHAPES, shrunk, write_shape

START_S = 180.0
AHEAD_S = 20.0


class Load(NamedTuple):
    clients: int
    num_prompt: int
    num_output: int

    @staticmethod
    def parse(text: str) -> Load:
        clients, num_prompt, num_output = map(int, text.split("x"))
        return Load(clients, num_prompt, num_output)

    def asks(self, count: int, rng: random.Random) -> list[Ask]:
        """A letter is a token: nothing merges in the tokenizer below."""
        return [
            Ask(0.0, "".join(rng.choices(string.ascii_letters, k=n)), n, self.num_output)
            for n in [self.num_prompt] * count
        ]


def write_tokenizer(folder: Path, num_tokens: int) -> None:
    """Bytes, and a made-up word for every other id, so that each token is text of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<unk>", "<s>", "</s>", *letters]
    words += [f"\u0120w{i}" for i in range(num_tokens - len(words))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def client(target: Target, asks: list[Ask], clients: int, begin: float, out: Any) -> None:
    async def work() -> list[Outcome]:
        await asyncio.sleep(max(0.0, begin - time.time()))
        return await closed_loop(target, asks, clients)

    out.put(asyncio.run(work()))


def drive(target: Target, load: Load, count: int, processes: int, seed: int) -> dict[str, Any]:
    """The load from several processes at once; their clocks start together."""
    rng, context = random.Random(seed), multiprocessing.get_context("spawn")
    out, begin = context.Queue(), time.time() + 4.0  # for the processes to be there
    running = []
    for index in range(min(processes, load.clients)):
        clients = load.clients // processes + (index < load.clients % processes)
        own = load.asks(count * clients // load.clients, rng)
        running.append(context.Process(target=client, args=(target, own, clients, begin, out)))
        running[-1].start()
    outcomes = [outcome for _ in running for outcome in out.get()]
    for process in running:
        process.join()
    return figures(outcomes, None)


class Server:
    def __init__(
        self, folder: Path, flags: Sequence[str], port: int, log: Path, is_file: bool = False
    ) -> None:
        """`is_file`: of several models, with what each is to be told."""
        words = [sys.executable, "-m", "quire", "serve", str(folder), "--port", str(port)]
        words += ["--no-store", "--max-queued-requests", "2000", "--public-metrics", *flags]
        if not is_file:
            words += ["--load-format", "dummy", "--served-model-name", "m"]
            words += ["--max-model-len", "2048"]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        with log.open("wb") as out:
            self.process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=5) as answer:
            return str(answer.read().decode())

    def await_ready(self) -> float:
        begun = time.monotonic()
        while time.monotonic() - begun < START_S and self.process.poll() is None:
            try:
                self.get("/ready")
                return time.monotonic() - begun
            except OSError:
                time.sleep(0.1)
        raise SystemExit("the server did not get ready; see its log")

    def await_ahead(self) -> float:
        """Until an idle engine has captured what it can, which takes some seconds after ready."""
        begun = time.monotonic()
        while b"ahead_done" not in self.log.read_bytes() and time.monotonic() - begun < AHEAD_S:
            time.sleep(0.1)
        return time.monotonic() - begun

    def cpu_seconds(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            name = next((w for w in process.cmdline() if w.startswith("quire.server.")), "")
            spent = process.cpu_times()
            key = name.removeprefix("quire.server.") or "other"
            found[key] = found.get(key, 0.0) + spent.user + spent.system
        return found

    def late_work(self) -> float:
        lines = self.get("/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("quire:late_work"))


@contextmanager
def serving(folder: Path, flags: Sequence[str], port: int, log: Path) -> Iterator[Server]:
    server = Server(folder, flags, port, log)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait(60)


def served(server: Server, loads: Sequence[Load], args: argparse.Namespace) -> list[dict[str, Any]]:
    target, rows = Target(server.url, "m"), []
    for number, load in enumerate(loads):
        before = server.cpu_seconds()
        record = drive(target, load, load.clients * args.rounds, args.processes, number)
        cores = {k: round((v - before.get(k, 0)) / record["seconds"], 2)
                 for k, v in server.cpu_seconds().items()}  # fmt: skip
        kept = ("failed", "output_tokens_per_s", "ttft_ms", "gap_ms")
        rows.append({"load": "x".join(map(str, load)), **{k: record[k] for k in kept}})
        rows[-1] |= {"cores": cores, "late_work": server.late_work()}
    return rows


OFFLINE = """
import json, random, sys, time
from quire import LLM, SamplingParams
folder, loads, vocab, flags = json.loads(sys.argv[1])
llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, **flags)
rng = random.Random(0)
def rate(clients, num_prompt, num_output):
    prompts = [{"prompt_token_ids": [rng.randrange(300, vocab) for _ in range(num_prompt)]}
               for _ in range(clients)]
    begun = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True),
                 use_tqdm=False)
    return clients * num_output / (time.perf_counter() - begun)
rate(*loads[0])
print(json.dumps([max(rate(*load) for _ in range(2)) for load in loads]))
"""


def offline(folder: Path, loads: Sequence[Load], vocab: int, flags: dict[str, Any]) -> list[float]:
    """In a process that is gone when the server starts: both want the whole GPU."""
    words = [sys.executable, "-c", OFFLINE, json.dumps([str(folder), loads, vocab, flags])]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    config = shrunk(SHAPES[name]) if args.rehearse else SHAPES[name]
    if args.rehearse:
        config = {**config, "max_position_embeddings": 2048}
    loads = [Load.parse(text) for text in args.loads.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_shape(config, folder)
        write_tokenizer(folder, int(config["vocab_size"]))
        alone = offline(folder, loads, int(config["vocab_size"]), {})
        log = Path(os.environ.get("OUT", scratch)) / f"served-{name}.log"
        with serving(folder, args.flags.split(), args.port, log) as server:
            ready = server.await_ready()
            ahead = 0.0 if args.rehearse else server.await_ahead()
            drive(Target(server.url, "m"), loads[0], loads[0].clients, args.processes, -1)
            rows = served(server, loads, args)
    for row, rate in zip(rows, alone, strict=True):
        row |= {"offline": round(rate, 1), "ratio": round(row["output_tokens_per_s"] / rate, 3)}
    times = {"ready_s": round(ready, 2), "ahead_s": round(ahead, 2)}
    return {"what": "served", "shape": name, **times, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--loads", default="64x128x256,256x128x256,64x1024x128")
    parser.add_argument("--rounds", type=int, default=4, help="requests of a client")
    parser.add_argument("--processes", type=int, default=6, help="of clients")
    parser.add_argument("--flags", default="", help="of the server")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    for name in args.shapes:
        print(json.dumps(measure(name, args)), flush=True)


if __name__ == "__main__":
    main()
