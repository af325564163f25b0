"""SocketConnector: two engines greet, lease and confirm over plain TCP.

The engine that offers listens, with a thread for each connection. How bytes cross is the mover's
(`inline.py`). The engine that pulls asks at the end whether the lease was alive all the time. A
connection that breaks, stalls or says something odd costs that transfer alone.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import takewhile

from quire.disagg import frames
from quire.disagg.connector import Alive, Mover, Ticket
from quire.disagg.leases import Leases
from quire.errors import TransferError
from quire.kv.tier_index import NOTHING_RAISED, Buffer, Lifted, Raised, Wanted
from quire.obs.log import log_event
from quire.tiers.memory import MemoryShelf

CONNECT_S, STALL_S = 5.0, 10.0
GREETING_S = 5.0  # for all of a greeting: strangers may not keep connections to themselves
SWEEP_S = 1.0
MAX_CONNECTIONS = 64
WILDCARDS = ("0.0.0.0", "::", "0")
_YES, _NO = b"\1", b"\0"


class SocketConnector:
    def __init__(
        self,
        memory: MemoryShelf,
        mover: Mover,
        secret: bytes,
        listen: str | None,
        peers: Collection[str],
    ) -> None:
        """`listen`: address to offer at, None for engines that only pull. `peers`: addresses that
        may be pulled from; a ticket with any other is refused. Raises OSError, or TransferError
        for an address that cannot be."""
        self.leases = Leases(memory)
        self._secret, self._mover = secret, mover
        self._peers = frozenset(peers)
        self._room = threading.Semaphore(MAX_CONNECTIONS)
        self._is_closed = False
        self.address = ""
        self._listener: socket.socket | None = None
        if listen is not None:
            host, port = split_address(listen)
            if host in WILDCARDS:
                raise TransferError(
                    "tickets carry the address, and nobody can connect to this one; name an"
                    " address of this machine"
                )
            self._listener = socket.create_server((host, port))
            self._listener.settimeout(SWEEP_S)
            self.address = f"{host}:{self._listener.getsockname()[1]}"
            threading.Thread(target=self._accept, name="kv-offers", daemon=True).start()

    # ------------------------------------------------------------ the side that has pages

    def offer(self, nodes: Sequence[Wanted], raised: Raised = NOTHING_RAISED) -> str:
        lease = self.leases.grant(nodes, raised) if self._listener is not None else None
        if lease is None:
            return ""
        return str(Ticket(self.address, lease.id, lease.generation, len(lease.nodes)))

    def withdraw(self, ticket: str) -> None:
        found = Ticket.parse(ticket)
        if found is not None:
            self.leases.end(found.lease)

    def close(self) -> None:
        self._is_closed = True
        self.leases.end_all()
        if self._listener is not None:
            self._listener.close()
        self._mover.close()

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._is_closed:
            self.leases.sweep()
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # closed
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(STALL_S)
                _at_once(connection)
                frames.greet(connection, self._secret, GREETING_S)
                self._answer(connection)
        except (OSError, TransferError) as error:
            if not self._is_closed:
                log_event("kv_offer_failed", severity=logging.WARNING, reason=str(error))
        finally:
            self._room.release()

    def _answer(self, connection: socket.socket) -> None:
        name, generation = frames.read_lease(frames.receive(connection, frames.PULL, 64))
        lease = self.leases.find(name, generation)

        def is_alive() -> bool:
            return self.leases.find(name, generation) is not None

        if lease is not None and lease.raising is not None:
            lease.raising.wait()
        self._mover.give(connection, lease.nodes if lease is not None else (), is_alive)
        frames.receive(connection, frames.CONFIRM, 64)
        is_good = is_alive() and self.leases.end(name)
        frames.send(connection, frames.ANSWER, _YES if is_good else _NO)

    # ------------------------------------------------------------ the side that wants them

    def pull(self, ticket: str, wanted: Sequence[Wanted], is_alive: Alive) -> list[Buffer | Lifted]:
        found = Ticket.parse(ticket)
        if found is None:
            raise TransferError(f"got {ticket[:80]!r}, which is no ticket")
        if found.address not in self._peers:
            raise TransferError(
                f"got a ticket of {found.address}, which is none of the peers"
                f" {', '.join(sorted(self._peers)) or '(none)'}; name it with --kv-peers"
            )
        try:
            with socket.create_connection(split_address(found.address), CONNECT_S) as connection:
                connection.settimeout(STALL_S)
                _at_once(connection)
                frames.answer_greeting(connection, self._secret)
                return self._take(connection, found, wanted, is_alive)
        except OSError as error:
            raise TransferError(f"cannot pull from {found.address}: {error}") from error

    def _take(
        self,
        connection: socket.socket,
        ticket: Ticket,
        wanted: Sequence[Wanted],
        is_alive: Alive,
    ) -> list[Buffer | Lifted]:
        body = frames.lease_body(ticket.lease, ticket.generation)
        frames.send(connection, frames.PULL, body)
        taken = self._mover.take(connection, wanted, is_alive)
        frames.send(connection, frames.CONFIRM, body)
        if frames.receive(connection, frames.ANSWER, 1) != _YES:
            raise TransferError("the lease ended before its pages were read")
        return [taken[node.key] for node in takewhile(lambda node: node.key in taken, wanted)]


def _at_once(connection: socket.socket) -> None:
    """Small frames do not wait for more to send: both sides take turns."""
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def split_address(text: str) -> tuple[str, int]:
    """
    >>> split_address("10.0.0.1:7000"), split_address("[::1]:7000")
    (('10.0.0.1', 7000), ('::1', 7000))
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise TransferError(f"got {text!r}, want an address such as 127.0.0.1:7000")
    return host.strip("[]"), int(port)
