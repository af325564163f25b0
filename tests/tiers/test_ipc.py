"""Pages between engines on one device, with strips in memory of this process in its place.

Whatever happens to the connection, all that is taken is right. Turns red when a damaged frame names
another row, when a row is given away before it was copied, or when what cannot be mapped is lost.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from quire.disagg import sockets
from quire.disagg.connector import Ticket
from quire.disagg.ipc_mover import IpcMover
from quire.disagg.sockets import SocketConnector
from quire.errors import TransferError
from quire.kv.tier_index import Raised, Stored
from quire.memory.strip import Strip, StripRow
from quire.tiers.memory import MemoryShelf
from quire.tiers.segment import Sealer
from tests.lanes import LateLane
from tests.tiers.nodes import DATA_BYTES, SECRET, data_of, node
from tests.tiers.test_sockets import NODES, NUM_NODES, Proxy

KNOWN: dict[bytes, Strip] = {}


class NearStrip:
    """A strip that is mapped by knowing its name."""

    def __init__(self, rows: int | Strip, device: str = "one", opens: bool = True) -> None:
        lane, cpu = LateLane(threading.RLock()), torch.device("cpu")
        self.strip = rows if isinstance(rows, Strip) else Strip(rows, DATA_BYTES, lane, cpu)
        self.device, self.name, self.opens = device, secrets.token_hex(8), opens
        self.num_opened = 0

    def bring(self, nodes: Sequence[Stored]) -> list[StripRow]:
        return self.strip.bring(nodes)

    def handle(self) -> bytes:
        KNOWN[self.name.encode()] = self.strip
        return self.name.encode()

    def open(self, handle: bytes) -> Strip | None:
        self.num_opened += 1
        return KNOWN[handle] if self.opens else None

    def copy(self, mapped: object, rows: Sequence[int]) -> list[StripRow]:
        assert isinstance(mapped, Strip)
        taken = self.strip.take_many(len(rows))
        for own, row in zip(taken, rows, strict=False):
            self.strip.rows[own.index] = mapped.rows[row]
        return taken


class Pair:
    def __init__(self, lends: NearStrip, takes: NearStrip, same_process: bool = False) -> None:
        self.lends, self.takes = lends, takes
        self.here = MemoryShelf(0)
        for number, one in enumerate(NODES):
            self.here.put(one, data_of(number), "test", "memory")
        movers = [
            IpcMover(Sealer(SECRET), DATA_BYTES, strip, process)
            for strip, process in ((lends, "a"), (takes, "a" if same_process else "b"))
        ]
        self.lender = SocketConnector(self.here, movers[0], SECRET, "127.0.0.1:0", ())
        self.proxy = Proxy(self.lender.address)
        peers = [self.lender.address, self.proxy.address]
        self.taker = SocketConnector(MemoryShelf(0), movers[1], SECRET, None, peers)

    def ticket(self, through_proxy: bool = False) -> str:
        ticket = Ticket.parse(self.lender.offer(NODES))
        assert ticket is not None
        return str(ticket._replace(address=self.proxy.address) if through_proxy else ticket)

    def pull(self, ticket: str, is_alive: Callable[[], bool] = lambda: True) -> list[object]:
        """What came, and whether it came inside the device."""
        return list(self.taker.pull(ticket, NODES, is_alive))

    def bytes_of(self, found: Sequence[object]) -> list[bytes]:
        rows = self.takes.strip.rows
        return [
            rows[one.index].numpy().tobytes() if isinstance(one, StripRow) else bytes(one)  # type: ignore[call-overload]
            for one in found
        ]

    def close(self) -> None:
        self.lender.close()
        self.proxy.listener.close()


WHOLE = [bytes(data_of(number)) for number in range(NUM_NODES)]


@pytest.mark.parametrize(
    "lends, takes, num_rows",
    [
        (NearStrip(NUM_NODES), NearStrip(NUM_NODES), NUM_NODES),
        (NearStrip(5), NearStrip(NUM_NODES), NUM_NODES),  # several times as many as it has
        (NearStrip(NUM_NODES), NearStrip(7), 7),  # the rest comes inline
        (NearStrip(NUM_NODES), NearStrip(NUM_NODES, device="two"), 0),
        (NearStrip(NUM_NODES), NearStrip(NUM_NODES, opens=False), 0),
    ],
    ids=["whole", "small lender", "small taker", "two devices", "not mapped"],
)
def test_rows_and_what_has_none(lends: NearStrip, takes: NearStrip, num_rows: int) -> None:
    pair = Pair(lends, takes)
    for _ in range(2):
        found = pair.pull(pair.ticket())
        assert pair.bytes_of(found) == WHOLE
        assert sum(isinstance(one, StripRow) for one in found) == num_rows
        del found
        assert takes.strip.num_free == len(takes.strip.rows)
    assert len(pair.lender.leases) == 0 and lends.strip.num_free == len(lends.strip.rows)
    if num_rows:
        assert takes.num_opened == 1, "mapped once, for all that follows"
    pair.close()


def test_rows_from_the_pool_are_lent_as_they_are() -> None:
    """Red when what lies on the device is brought there again, or the rest is forgotten."""
    lends, takes = NearStrip(NUM_NODES), NearStrip(NUM_NODES)
    pair, brought = Pair(lends, takes), list[int]()
    bring = lends.bring
    lends.bring = lambda nodes: [brought.append(len(nodes)), bring(nodes)][1]  # type: ignore[method-assign]
    rows = lends.strip.take_many(7)
    for number, row in enumerate(rows):
        lends.strip.rows[row.index] = torch.frombuffer(data_of(number), dtype=torch.uint8)
    ticket = pair.lender.offer(NODES, Raised(rows))
    del rows, row
    assert lends.strip.num_free == NUM_NODES - 7, "a lease holds its rows"
    assert pair.bytes_of(pair.pull(ticket)) == WHOLE and brought == [NUM_NODES - 7]
    deadline = time.monotonic() + 5.0  # the thread that answered may not have left yet
    while lends.strip.num_free < NUM_NODES and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lends.strip.num_free == NUM_NODES, "the lease has ended"
    ticket = pair.lender.offer(NODES, Raised(lends.strip.take_many(5)))
    pair.lender.withdraw(ticket)
    assert lends.strip.num_free == NUM_NODES
    pair.close()


def test_one_process_sends_bytes() -> None:
    pair = Pair(NearStrip(NUM_NODES), NearStrip(NUM_NODES), same_process=True)
    assert pair.pull(pair.ticket()) == [data_of(number) for number in range(NUM_NODES)]
    pair.close()


def test_transfers_broken_at_random_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "STALL_S", 0.5)
    pair, rng, num_whole = Pair(NearStrip(5), NearStrip(NUM_NODES)), random.Random(4), 0
    for _ in range(30):
        direction = rng.choice(["up", "down"])
        pair.proxy.fault = (rng.choice(["cut", "flip"]), direction, rng.randrange(900))
        ticket = pair.ticket(through_proxy=True)
        try:
            found = pair.pull(ticket)
        except TransferError:
            pair.lender.withdraw(ticket)
            continue
        num_whole += len(found) == NUM_NODES
        assert pair.bytes_of(found) == WHOLE[: len(found)]
        del found
    pair.proxy.fault = None
    assert 0 < num_whole < 30 and len(pair.lender.leases) == 0
    assert len(pair.pull(pair.ticket())) == NUM_NODES
    assert all(kept.owners == {"test"} for kept in pair.here._nodes.values())
    pair.close()


def test_a_lease_that_ends_in_the_middle_is_not_used() -> None:
    pair = Pair(NearStrip(5), NearStrip(NUM_NODES))
    ticket, seen = pair.ticket(), list[int]()

    def is_alive() -> bool:
        seen.append(1)
        if len(seen) == 2:
            pair.lender.withdraw(ticket)
        return True

    with pytest.raises(TransferError, match="lease ended"):
        pair.pull(ticket, is_alive)
    assert pair.takes.strip.num_free == NUM_NODES, "rows that were not confirmed were kept"
    with pytest.raises(TransferError, match="nobody waits"):
        pair.pull(pair.ticket(), lambda: False)
    pair.close()


def test_a_lender_that_was_started_anew_is_mapped_anew() -> None:
    takes = NearStrip(NUM_NODES)
    pair = Pair(NearStrip(NUM_NODES), takes)
    assert pair.bytes_of(pair.pull(pair.ticket())) == WHOLE
    lends = NearStrip(NUM_NODES)
    pair.lender._mover = IpcMover(Sealer(SECRET), DATA_BYTES, lends, "c")
    assert pair.bytes_of(pair.pull(pair.ticket())) == WHOLE
    assert takes.num_opened == 2 and node(0) == NODES[0]
    pair.close()
