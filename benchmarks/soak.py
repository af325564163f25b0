"""Hours in minutes: a served engine under load, with random faults, and what is left of it after.

Clients ask for greedy answers whose text is known beforehand, whole and streamed; some read slowly,
some leave, some send nonsense. Meanwhile engine and API processes are killed and stopped. An answer
may end with an error that says so; it may not be wrong, and nobody may wait for ever. The last part
runs without kills, so that growth of memory and files shows. Prints one JSON line; exits with 1
when something was wrong.

    python benchmarks/soak.py --minutes 30
    python benchmarks/soak.py --minutes 1 --seed 7
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.harness import Served, wait_until
from tests.e2e.raw import request_bytes
from tests.tiny_folder import write_tiny_folder

CLIENTS = 24
NUM_PROMPTS = 24
PATIENCE_S = 120.0  # whoever waits longer has been forgotten; --patience for a shared machine
CALM_SHARE = 0.4  # of the time, at the end: no kills
# The supervisor gives up after six crashes of one process in ten minutes.
KILL_EVERY_S = 115.0
# The pool holds a part of what runs: preemption is the rule.
FLAGS = ("--device", "cpu", "--load-format", "dummy", "--threads", "1", "--api-processes", "2")
POOL = ("--max-num-seqs", "12", "--kv-cache-memory", "150KiB", "--max-model-len", "512")


@dataclass
class Account:
    """What happened, and everything that should not have."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def blame(self, what: str) -> None:
        self.wrong.append(what)


# ------------------------------------------------------------ one request


def body_of(number: int, **fields: Any) -> dict[str, Any]:
    """Prompts share a beginning, so that the prefix cache has work."""
    prompt = "Once upon a time, " + "there was more to say, " * (number % 5) + f"and {number}:"
    length = 8 + 13 * number % 90
    return {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True, **fields}


class Conversation:
    """One connection and what came over it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.status, self.text = 0, b""
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, body: Any, pace: float = 0.0, most: int | None = None) -> None:
        """Read to the end, or `most` bytes and hang up; `pace` seconds between reads."""
        reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = request_bytes("/v1/completions", body, headers={"Connection": "close"})
        self._writer.write(data)
        got = b""
        while part := await reader.read(256 if pace else 1 << 16):
            got += part
            if most is not None and len(got) >= most:
                break
            await asyncio.sleep(pace)
        self._writer.transport.abort()
        head, _, self.text = got.partition(b"\r\n\r\n")
        self.status = int(head.split(b" ")[1]) if head.startswith(b"HTTP/") else 0


def streamed_text(raw: bytes) -> tuple[str, bool]:
    """(text, whether the stream came to its end)."""
    text, is_done = "", False
    for line in raw.split(b"\n"):
        line = line.strip()
        if line == b"data: [DONE]":
            is_done = True
        elif line.startswith(b"data: "):
            with suppress(ValueError):  # cut off in the middle of a line
                event = json.loads(line[6:])
                if "error" in event:
                    return text, False
                text += "".join(choice["text"] for choice in event.get("choices", ()))
    return text, is_done


async def streamed(port: int, number: int, answers: list[str], to: Account, pace: float) -> None:
    talk = Conversation(port)
    await talk.ask(body_of(number, stream=True), pace)
    text, is_done = streamed_text(talk.text)
    if not answers[number].startswith(text) or (is_done and text != answers[number]):
        to.blame(f"prompt {number} streamed {text!r}, want {answers[number]!r}")
    if is_done:
        to.counts["streams whole"] += 1
    elif talk.status == 200:
        to.counts["streams that ended with an error"] += 1
    else:
        to.counts[f"streams refused {talk.status}"] += 1


async def whole(port: int, number: int, answers: list[str], to: Account) -> None:
    talk = Conversation(port)
    await talk.ask(body_of(number))
    to.counts[f"whole answers {talk.status}"] += 1
    if talk.status == 200:
        with suppress(ValueError):  # the process died while it wrote
            text = json.loads(talk.text)["choices"][0]["text"]
            if text != answers[number]:
                to.blame(f"prompt {number} answered {text!r}, want {answers[number]!r}")
    elif talk.status not in (0, 429, 500, 502, 503, 504):
        to.blame(f"prompt {number}: status {talk.status}")


async def nonsense(port: int, to: Account) -> None:
    talk = Conversation(port)
    await talk.ask({"prompt": [-5], "max_tokens": "many"})
    to.counts[f"nonsense {talk.status}"] += 1
    if talk.status not in (0, 400, 429, 503):
        to.blame(f"nonsense: status {talk.status}")


async def leave(port: int, number: int, to: Account, dice: random.Random) -> None:
    await Conversation(port).ask(body_of(number, stream=True, n=2), most=dice.randrange(1, 4_000))
    to.counts["left early"] += 1


@dataclass(frozen=True)
class Plan:
    """How long, how often a fault, and how long nobody may wait; all in seconds."""

    seconds: float
    every: float
    patience: float
    seed: int


async def client(
    port: int, answers: list[str], to: Account, until: float, plan: Plan, number: int
) -> None:
    dice = random.Random(plan.seed + number)
    while time.monotonic() < until:
        number, kind = dice.randrange(NUM_PROMPTS), dice.random()
        if kind < 0.55:
            one = streamed(port, number, answers, to, 0.0)
        elif kind < 0.6:
            one = streamed(port, number, answers, to, 0.01)
        elif kind < 0.8:
            one = whole(port, number, answers, to)
        elif kind < 0.95:
            one = leave(port, number, to, dice)
        else:
            one = nonsense(port, to)
        try:
            await asyncio.wait_for(one, plan.patience)
        except TimeoutError:
            to.blame(f"prompt {number}: no end within {plan.patience} s")
        except OSError:
            to.counts["connections broken"] += 1
        await asyncio.sleep(0.05)


# ------------------------------------------------------------ faults


def processes(served: Served) -> dict[str, list[psutil.Process]]:
    found: dict[str, list[psutil.Process]] = {"engine_main": [], "api_main": []}
    for child in psutil.Process(served.process.pid).children():
        with suppress(psutil.Error):
            words = " ".join(child.cmdline())
            for name, list_ in found.items():
                if f"quire.server.{name}" in words:
                    list_.append(child)
    return found


def kill_engine(served: Served) -> None:
    processes(served)["engine_main"][0].kill()


def kill_api(served: Served) -> None:
    processes(served)["api_main"][0].kill()


def stop_engine(served: Served) -> None:
    engine = processes(served)["engine_main"][0]
    engine.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    engine.send_signal(signal.SIGCONT)


async def trouble(served: Served, to: Account, until: float, plan: Plan) -> None:
    dice = random.Random(plan.seed)
    faults: list[Callable[[Served], None]] = [kill_engine, kill_api, stop_engine]
    turn = 0
    while True:
        await asyncio.sleep(plan.every / len(faults) * dice.uniform(0.7, 1.3))
        if time.monotonic() > until:
            return
        if turn % len(faults) == 0:
            dice.shuffle(faults)
        fault = faults[turn % len(faults)]
        with suppress(psutil.Error, IndexError):  # it is being restarted
            await asyncio.to_thread(fault, served)
            to.counts[fault.__name__] += 1
        turn += 1


# ------------------------------------------------------------ what is left


def held(served: Served) -> dict[str, tuple[int, float]]:
    """(open files, MB) of each kind of process."""
    kinds = {"supervisor": [psutil.Process(served.process.pid)], **processes(served)}
    return {
        kind: (sum(p.num_fds() for p in all_), sum(p.memory_info().rss for p in all_) / 1e6)
        for kind, all_ in kinds.items()
    }


def compare(before: dict[str, tuple[int, float]], served: Served, to: Account) -> dict[str, Any]:
    after = held(served)
    for kind, (files, megabytes) in after.items():
        if files > before[kind][0] + 4:
            to.blame(f"{kind} holds {files} files, {before[kind][0]} before")
        if megabytes > before[kind][1] * 1.15 + 10:
            to.blame(f"{kind} holds {megabytes:.0f} MB, {before[kind][1]:.0f} before")
    return {kind: [before[kind], after[kind]] for kind in after}


def ends_idle(served: Served, plan: Plan) -> None:
    """No page held, nobody waits; a server that does not answer for a while is asked again."""

    def is_idle() -> bool:
        with suppress(OSError):
            counts = served.counts()
            keys = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            return all(v == 0 for k, v in counts.items() if k.startswith(keys))
        return False

    wait_until(is_idle, plan.patience, "idle at the end")


async def soak(served: Served, plan: Plan) -> dict[str, Any]:
    to = Account()
    answers = []
    for number in range(NUM_PROMPTS):
        talk = Conversation(served.port)
        await talk.ask(body_of(number))
        answers.append(json.loads(talk.text)["choices"][0]["text"])
    begun = time.monotonic()
    end, calm = begun + plan.seconds, begun + plan.seconds * (1 - CALM_SHARE)
    work = [client(served.port, answers, to, end, plan, i) for i in range(CLIENTS)]
    tasks = [asyncio.ensure_future(one) for one in work]
    await trouble(served, to, calm, plan)
    ready = "ready after the last fault"
    await asyncio.to_thread(wait_until, served.is_ready, plan.patience, ready)
    await asyncio.sleep(min(60.0, plan.seconds * CALM_SHARE / 3))  # warm again
    before = held(served)
    await asyncio.gather(*tasks)
    await asyncio.to_thread(ends_idle, served, plan)
    await asyncio.sleep(1.0)
    left = compare(before, served, to)
    preempted = sum(v for k, v in served.counts().items() if k.startswith("num_preemptions"))
    to.counts["preempted"] = int(preempted)
    return {"counts": dict(to.counts), "files_and_mb": left, "wrong": to.wrong[:20]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=KILL_EVERY_S, help="seconds for all faults")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds to wait")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_folder(Path(folder), max_position_embeddings=4_096)
        with Served(model, *FLAGS, *POOL) as served:
            plan = Plan(60 * args.minutes, args.every, args.patience, args.seed)
            found = asyncio.run(soak(served, plan))
            print(f"log: {served.log}", file=sys.stderr)
    print(json.dumps({"what": "soak", "minutes": args.minutes, "seed": args.seed, **found}))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
