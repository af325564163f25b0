"""Pages between two engines: whatever happens to the connection, all that is taken is right.

A proxy between the two cuts, stalls or damages what passes at a random moment. Turns red when a
read that was not confirmed is used, when a lease outlives its deadline, or a pin its lease.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from quire.disagg import sockets
from quire.disagg.connector import Ticket
from quire.disagg.inline import InlineMover
from quire.disagg.leases import Leases
from quire.disagg.sockets import SocketConnector, split_address
from quire.errors import TransferError
from quire.kv.tier_index import Wanted
from quire.tiers.memory import MemoryShelf
from quire.tiers.segment import Sealer
from tests.tiers.nodes import DATA_BYTES, SECRET, data_of, node

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))
NUM_FAULTS = 1000 if IS_LONG else 80
NUM_NODES = 12
NODES = [node(i) for i in range(NUM_NODES)]


def mover() -> InlineMover:
    return InlineMover(Sealer(SECRET), DATA_BYTES)


class Proxy:
    """Passes bytes on, both ways, until `fault` happens at a byte of one direction."""

    def __init__(self, target: str) -> None:
        self.target = split_address(target)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.fault: tuple[str, str, int] | None = None  # kind, direction, byte
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(self.target)
            for name, source, target in (("up", near, far), ("down", far, near)):
                threading.Thread(
                    target=self._pass, args=(name, source, target), daemon=True
                ).start()

    def _pass(self, name: str, source: socket.socket, target: socket.socket) -> None:
        seen = 0
        try:
            while data := bytearray(source.recv(1500)):
                kind, direction, at = self.fault or ("", "", 0)
                if direction == name and seen <= at < seen + len(data):
                    if kind == "flip":
                        data[at - seen] ^= 0x41
                    else:
                        target.sendall(data[: at - seen])
                        break
                target.sendall(data)
                seen += len(data)
        except OSError:
            pass
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Pair:
    """An engine that has pages and one that wants them, each with its memory."""

    def __init__(self) -> None:
        self.here = MemoryShelf(0)
        for number, one in enumerate(NODES):
            self.here.put(one, data_of(number), "test", "memory")
        self.lender = SocketConnector(self.here, mover(), SECRET, "127.0.0.1:0", ())
        self.proxy = Proxy(self.lender.address)
        peers = [self.lender.address, self.proxy.address]
        self.taker = SocketConnector(MemoryShelf(0), mover(), SECRET, None, peers)

    def ticket(self, through_proxy: bool = False) -> str:
        ticket = Ticket.parse(self.lender.offer(NODES))
        assert ticket is not None and ticket.num_nodes == NUM_NODES
        return str(ticket._replace(address=self.proxy.address) if through_proxy else ticket)

    def pull(self, ticket: str, wanted: list[Wanted] = NODES) -> list[bytearray]:
        return self.taker.pull(ticket, wanted, lambda: True)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.lender.close()
    made.proxy.listener.close()


def test_pages_arrive_and_the_lease_ends(pair: Pair) -> None:
    ticket = pair.ticket()
    assert pair.pull(ticket) == [data_of(i) for i in range(NUM_NODES)]
    assert len(pair.lender.leases) == 0
    with pytest.raises(TransferError, match="ended"):
        pair.pull(ticket)


def test_only_what_is_wanted_is_kept(pair: Pair) -> None:
    found = pair.pull(pair.ticket(), [*NODES[5:], node(99)])
    assert found == [data_of(i) for i in range(5, NUM_NODES)]
    assert pair.pull(pair.ticket(), [node(99), *NODES]) == [], "a chain with a gap in front"


def test_transfers_broken_at_random_moments(pair: Pair) -> None:
    """0 wrong pages, 0 leases and pins left: cut or damaged, in both directions."""
    rng, num_whole = random.Random(4), 0
    total = NUM_NODES * (64 + 32 + 3000 + 9) + 200
    for _ in range(NUM_FAULTS):
        direction = rng.choice(["up", "down", "down"])
        most = 150 if direction == "up" else total
        pair.proxy.fault = (rng.choice(["cut", "flip"]), direction, rng.randrange(most))
        ticket = pair.ticket(through_proxy=True)
        try:
            found = pair.pull(ticket)
        except TransferError:
            pair.lender.withdraw(ticket)
        else:
            num_whole += len(found) == NUM_NODES
            # A key that came damaged is nobody's, so the chain ends there.
            assert found == [data_of(i) for i in range(len(found))]
    pair.proxy.fault = None
    assert 0 < num_whole < NUM_FAULTS
    assert len(pair.lender.leases) == 0
    assert all(kept.owners == {"test"} for kept in pair.here._nodes.values()), "a pin was left"


def test_a_lease_that_ends_in_the_middle_is_not_used(pair: Pair) -> None:
    """Red when pages that were read before the lease ended count as good."""
    ticket = pair.ticket()
    seen = []

    def is_alive() -> bool:
        seen.append(1)
        if len(seen) == 3:
            pair.lender.withdraw(ticket)
        return True

    with pytest.raises(TransferError, match="lease ended"):
        pair.taker.pull(ticket, NODES, is_alive)
    assert len(seen) >= 3


def test_generations_do_not_come_back(pair: Pair) -> None:
    ticket = Ticket.parse(pair.ticket())
    assert ticket is not None
    for other in (ticket.generation + 1, 0):
        with pytest.raises(TransferError, match="ended"):
            pair.pull(str(ticket._replace(generation=other)))
    assert len(pair.pull(str(ticket))) == NUM_NODES


def test_whoever_stops_waiting_stops_the_transfer(pair: Pair) -> None:
    ticket = pair.ticket()
    with pytest.raises(TransferError, match="nobody waits"):
        pair.taker.pull(ticket, NODES, lambda: False)
    pair.lender.withdraw(ticket)


def test_leases_end_by_themselves() -> None:
    memory, now = MemoryShelf(0), [0.0]
    leases = Leases(memory, 30.0, lambda: now[0])
    memory.put(NODES[0], data_of(0), "test", "memory")
    lease = leases.grant(NODES)
    assert lease is not None and len(lease.nodes) == 1
    memory.let_go("test")
    now[0] = 29.0
    assert leases.find(lease.id, lease.generation) is lease and len(memory) == 1
    now[0] = 30.0
    assert leases.find(lease.id, lease.generation) is None and len(memory) == 0
    assert leases.grant(NODES) is None, "nothing is there any more"


def test_strangers_are_turned_away(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another secret (another model's too), an address nobody named, garbage, no engine at all."""
    monkeypatch.setattr(sockets, "STALL_S", 0.5)
    stranger = SocketConnector(MemoryShelf(0), mover(), b"x" * 32, None, [pair.lender.address])
    ticket = pair.ticket()
    with pytest.raises(TransferError):
        stranger.pull(ticket, NODES, lambda: True)
    elsewhere = Ticket.parse(ticket)
    assert elsewhere is not None
    with pytest.raises(TransferError, match="none of the peers"):
        pair.pull(str(elsewhere._replace(address="127.0.0.1:1")))
    for text in ("", "nonsense", ticket + "x", "a" * 10_000):
        with pytest.raises(TransferError, match="no ticket"):
            pair.pull(text)
    with socket.create_connection(split_address(pair.lender.address)) as raw:
        raw.sendall(random.Random(1).randbytes(4000))
    gone = SocketConnector(MemoryShelf(0), mover(), SECRET, None, ["127.0.0.1:1"])
    with pytest.raises(TransferError, match="cannot pull"):
        gone.pull(str(elsewhere._replace(address="127.0.0.1:1")), NODES, lambda: True)
    assert len(pair.pull(ticket)) == NUM_NODES, "none of that has cost the lease"


def test_a_silent_peer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "STALL_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        taker = SocketConnector(MemoryShelf(0), mover(), SECRET, None, [address])
        begun = time.monotonic()
        with pytest.raises(TransferError, match="timed out"):
            taker.pull(str(Ticket(address, "0" * 32, 1, 1)), NODES, lambda: True)
        assert time.monotonic() - begun < 5


def test_whoever_greets_slowly_is_turned_away(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when strangers that send a byte now and then can keep all connections to themselves."""
    monkeypatch.setattr(sockets, "GREETING_S", 0.3)
    with socket.create_connection(split_address(pair.lender.address)) as slow:
        slow.settimeout(30.0)
        with suppress(OSError):
            for byte in bytes([2, 32, 0, 0, 0, 0, 0, 0, 0, *range(32)])[:-1]:
                slow.sendall(bytes([byte]))
                time.sleep(0.05)
            slow.recv(1000)  # its hello
            assert slow.recv(1) == b"", "still listened to"
    assert len(pair.pull(pair.ticket())) == NUM_NODES


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_an_address_that_nobody_can_connect_to_is_refused(listen: str) -> None:
    """Tickets carry the address: with this one each of them would be refused by the other side."""
    with pytest.raises(TransferError, match="name an address of this machine"):
        SocketConnector(MemoryShelf(0), mover(), SECRET, listen, ())
