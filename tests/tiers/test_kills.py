"""Two processes that pull from each other, one of which is killed in the middle, with SIGKILL.

Turns red when the one that is left takes a page that was not confirmed or is not what was lent,
waits for ever, or keeps a lease or a pin for the one that is gone.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rules.source import ROOT
from tests.tiers.peer_child import NUM_NODES

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))
NUM_KILLS = 1000 if IS_LONG else 16
FRAMES = 38  # of a pull and a loan, and two more: then nobody is hit in the middle
FIRST = {"one": 0, "two": 100}


class Remote:
    """A peer in a process of its own."""

    def __init__(self, forker: Path) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(60.0)
        self.connection.connect(str(forker))
        self.answers = self.connection.makefile("r")
        self.pid = int(self.answers.readline())

    def tell(self, words: str) -> None:
        self.connection.sendall(f"{words}\n".encode())

    def answer(self) -> str:
        """Empty: it is dead."""
        try:
            return self.answers.readline().strip()
        except ConnectionError:
            return ""

    def ask(self, words: str) -> str:
        self.tell(words)
        return self.answer()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.connection.close()
        self.answers.close()


@pytest.fixture
def forker(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "forker"
    words = [sys.executable, "-m", "tests.tiers.peer_child", str(path)]
    child = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    yield path
    child.kill()
    child.wait()
    child.stdout.close()


def test_either_side_is_killed(forker: Path) -> None:
    """At a random frame, or whenever a signal happens to come."""
    rng, seen = random.Random(6), Counter[str]()
    peers = {name: Remote(forker) for name in FIRST}
    for _ in range(NUM_KILLS):
        victim, left = rng.sample(sorted(FIRST), 2)
        tickets = {name: peers[name].ask(f"offer {FIRST[name]}") for name in FIRST}
        at_frame = rng.random() < 0.7
        if at_frame:
            assert peers[victim].ask(f"die {rng.randint(1, FRAMES)}") == "yes"
        for name, other in ((victim, left), (left, victim)):
            peers[name].tell(f"pull {FIRST[other]} {tickets[other]}")
        if not at_frame:
            time.sleep(rng.random() * 0.02)
            peers[victim].kill()
        said = peers[left].answer()
        assert said in ("right 0", f"right {NUM_NODES}"), f"{said!r}: part of a chain, or dead"
        assert peers[left].ask("look") == "0 leases, ['own'], 0 strangers"
        seen[said] += 1
        peers[victim].kill()
        peers[victim] = Remote(forker)
    assert len(seen) == 2, f"all of them ended alike: {seen}"
    for peer in peers.values():
        peer.kill()
