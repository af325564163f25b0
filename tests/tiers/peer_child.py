"""A process that forks peers: each lends its pages, pulls those of another, and may be killed.

Whoever connects to the socket named on the command line gets a peer of its own. It says its number,
then does what it is told, a line at a time:

    offer FIRST            lend nodes from FIRST on; answers with a ticket
    die N                  send yourself SIGKILL at the N-th frame from now on
    pull FIRST TICKET      pull these nodes and look at every byte; answers `right COUNT`
    look                   let all leases run out; answers with what is left of them and of pins
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from quire.disagg import frames
from quire.disagg.connector import Ticket
from quire.disagg.inline import InlineMover
from quire.disagg.leases import Leases
from quire.disagg.sockets import SocketConnector
from quire.request import RequestId
from quire.tiers.memory import MemoryShelf
from quire.tiers.segment import Sealer
from quire.tiers.tempo import Tempo
from quire.tiers.tiers import Tiers
from tests.tiers.nodes import SECRET, data_of, node

NUM_NODES, NODE_BYTES = 12, 60_000


class Peer:
    def __init__(self) -> None:
        self.now = 0.0
        self.memory = MemoryShelf(0)
        self.mover = InlineMover(Sealer(SECRET), NODE_BYTES)
        self.tiers = Tiers(self.memory, None, Tempo(), NODE_BYTES)
        self.lender = SocketConnector(self.memory, self.mover, SECRET, "127.0.0.1:0", ())
        self.lender.leases = Leases(self.memory, 30.0, lambda: self.now)
        self.num_pulls, self.frames_left = 0, 0

    def offer(self, first: str) -> str:
        nodes = [node(int(first) + i) for i in range(NUM_NODES)]
        for i, one in enumerate(nodes):
            self.memory.put(one, data_of(int(first) + i, NODE_BYTES), "own", "memory")
        return self.lender.offer(nodes)

    def die(self, count: str) -> str:
        self.frames_left = int(count)
        for name in ("send", "receive"):
            setattr(frames, name, self._counted(getattr(frames, name)))
        return "yes"

    def _counted(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.frames_left -= 1
            if self.frames_left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args)

        return counted

    def pull(self, first: str, ticket: str) -> str:
        found = Ticket.parse(ticket)
        assert found is not None
        self.tiers.remote = SocketConnector(
            MemoryShelf(0), self.mover, SECRET, None, [found.address]
        )
        self.num_pulls += 1
        owner, numbers = RequestId(self.num_pulls), range(int(first), int(first) + NUM_NODES)
        assert self.tiers.fetch(owner, [node(number) for number in numbers], ticket)
        assert self.tiers._puller.wait(60.0) and not self.tiers.is_bringing(owner)
        count = 0
        for number in numbers:
            if not self.tiers.pin(owner, node(number)):
                break
            assert self.tiers.get(node(number).key).data == data_of(number, NODE_BYTES), number
            count += 1
        self.tiers.let_go(owner)
        return f"right {count}"

    def look(self) -> str:
        self.now += 31.0
        self.lender.leases.sweep()
        owners = {owner for kept in self.memory._nodes.values() for owner in kept.owners}
        strangers = sum(kept.owners != {"own"} for kept in self.memory._nodes.values())
        return f"{len(self.lender.leases)} leases, {sorted(owners)}, {strangers} strangers"


def serve(connection: socket.socket) -> None:
    peer, lines = Peer(), connection.makefile("r")
    connection.sendall(f"{os.getpid()}\n".encode())
    for line in lines:
        name, *args = line.split()
        connection.sendall(f"{getattr(peer, name)(*args)}\n".encode())


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever is killed leaves nothing behind
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                serve(connection)
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main()
