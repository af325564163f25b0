"""Real NIXL between two processes: what is read is right, and a lender that dies costs a read."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from quire.disagg.connector import Ticket
from quire.disagg.sockets import SocketConnector
from quire.errors import TransferError
from quire.tiers.memory import MemoryShelf
from quire.tiers.segment import Sealer
from tests.rules.source import ROOT
from tests.tiers.nodes import SECRET, data_of, node

pytest.importorskip("nixl")

from quire.disagg.nixl_mover import NixlMover

COUNT, SIZE = 16, 200_000


@contextmanager
def lending() -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    words = [sys.executable, "-m", "tests.tiers.lending_child", str(COUNT), str(SIZE)]
    child = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        line = ""
        while not line.startswith("tickets "):
            line = child.stdout.readline()
            assert line, "the lender ended"
        yield child, line.split()[1:]
    finally:
        child.kill()
        child.wait()


@pytest.fixture(scope="module")
def mover() -> NixlMover:
    return NixlMover(Sealer(SECRET), SIZE)


def taker_of(mover: NixlMover, ticket: str) -> SocketConnector:
    found = Ticket.parse(ticket)
    assert found is not None
    return SocketConnector(MemoryShelf(0), mover, SECRET, None, [found.address])


def test_pages_are_read(mover: NixlMover) -> None:
    nodes = [node(number) for number in range(COUNT)]
    with lending() as (_, tickets):
        taker = taker_of(mover, tickets[0])
        whole = taker.pull(tickets[0], nodes, lambda: True)
        assert whole == [data_of(number, SIZE) for number in range(COUNT)]
        part = taker.pull(tickets[1], nodes[5:], lambda: True)
        assert part == whole[5:]
        with pytest.raises(TransferError, match="ended"):
            taker.pull(tickets[0], nodes, lambda: True)
    assert mover._unfinished == []


def test_a_lender_dies(mover: NixlMover) -> None:
    """Before, in the middle or after: an error or the right bytes, and no memory is left."""
    nodes = [node(number) for number in range(COUNT)]
    want = [data_of(number, SIZE) for number in range(COUNT)]
    for delay in (0.0, 0.004, 0.02):
        with lending() as (child, tickets):
            taker = taker_of(mover, tickets[0])

            def kill(child: subprocess.Popen[str] = child, delay: float = delay) -> None:
                time.sleep(delay)
                child.kill()

            killer = threading.Thread(target=kill)
            killer.start()
            with suppress(TransferError):
                assert taker.pull(tickets[0], nodes, lambda: True) == want
            killer.join()
            with pytest.raises(TransferError):
                taker.pull(tickets[1], nodes, lambda: True)
