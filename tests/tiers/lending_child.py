"""Lends nodes through NIXL until it is killed; writes its address and tickets to stdout."""

from __future__ import annotations

import sys
import time

from quire.disagg.nixl_mover import NixlMover
from quire.disagg.sockets import SocketConnector
from quire.tiers.memory import MemoryShelf
from quire.tiers.segment import Sealer
from tests.tiers.nodes import SECRET, data_of, node


def main() -> None:
    count, size = int(sys.argv[1]), int(sys.argv[2])
    memory = MemoryShelf(0)
    for number in range(count):
        memory.put(node(number), data_of(number, size), "test", "memory")
    mover = NixlMover(Sealer(SECRET), size)
    lender = SocketConnector(memory, mover, SECRET, "127.0.0.1:0", ())
    tickets = [lender.offer([node(number) for number in range(count)]) for _ in range(3)]
    print("tickets", *tickets, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
