"""Ranks on other machines: how they come to the first one, and how it sees them.

The first machine listens at an address. Every other one runs `quire join`, which asks there which
ranks are its own and starts them; each then comes by itself. Both sides prove that they know a
secret before anything else is said. Whoever does not come, or is of another version or number of
machines, is named within a deadline. Steps go over gloo, which asks nobody who he is: the network
between the machines must be one that others cannot reach.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quire import env
from quire.config import Parallel
from quire.disagg.frames import answer_greeting, greet
from quire.engine.wire import Codec, is_readable, receive
from quire.errors import EngineDead, NotSupported, RankLost, TransferError
from quire.tiers.secret_file import read_secret
from quire.version import __version__

GREET_S = 10.0  # for whoever has connected to say who it is
RETRY_S = 0.2
JOIN_S = 300.0


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A machine, or one rank of it, is here."""

    node: int
    num_nodes: int
    version: str
    rank: int | None = None  # None: the machine, which asks for its ranks


class Places(msgspec.Struct, frozen=True, tag=True):
    """Come in, and these are your ranks."""

    ranks: tuple[int, ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    why: str


def hellos() -> Codec[Hello]:
    return Codec(Hello)


def replies() -> Codec[Places | Refused]:
    return Codec(Places | Refused)


@dataclass(frozen=True, slots=True)
class RemoteRank:
    """`dist.launch.Rank` at the far end of a connection; it ends when that does."""

    rank: int
    link: socket.socket
    address: str

    def fate(self, seconds: float = 0.0) -> str | None:
        """How it ended; None: it has not, so far."""
        try:
            if not is_readable(self.link, seconds):
                return None
            gone = self.link.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):  # closed by us
            gone = True
        return f"at {self.address} closed its connection" if gone else None

    def kill(self) -> None:
        with suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)

    def reap(self) -> None:
        self.link.close()


def secret_of(asked: Parallel) -> bytes:
    path = Path(asked.rank_secret or env.cache_folder() / "rank-secret").expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return read_secret(path)
    except (OSError, ValueError) as error:
        raise NotSupported(f"cannot use {path} as rank_secret: {error}; name another") from error


def ranks_on(asked: Parallel, node: int) -> tuple[int, ...]:
    """Neighbours, as many on each machine."""
    each = asked.num_ranks // asked.nnodes
    return tuple(range(node * each, (node + 1) * each))


def await_nodes(asked: Parallel) -> tuple[RemoteRank, ...]:
    """Everybody on other machines, in order. Raises RankLost when somebody does not come."""
    secret = secret_of(asked)
    missing = {r for node in range(1, asked.nnodes) for r in ranks_on(asked, node)}
    came: dict[int, RemoteRank] = {}
    refused = ""
    until = time.monotonic() + (asked.distributed_timeout_seconds or JOIN_S)
    try:
        with _listener(asked) as listener:
            while missing and (left := until - time.monotonic()) > 0:
                listener.settimeout(left)
                try:
                    link, (host, *_) = listener.accept()
                except TimeoutError:
                    break
                try:
                    rank = _admit(link, asked, secret, missing)
                except (TransferError, EngineDead, OSError) as error:
                    refused = f"; {host} came and was refused: {error}"
                    link.close()
                    continue
                if rank is not None:
                    missing.discard(rank)
                    came[rank] = RemoteRank(rank, link, host)
        if missing:
            raise RankLost(_absent(asked, missing) + refused)
    except BaseException:
        for one in came.values():
            one.reap()
        raise
    return tuple(came[rank] for rank in sorted(came))


def _absent(asked: Parallel, missing: set[int]) -> str:
    each = asked.num_ranks // asked.nnodes
    nodes = sorted({rank // each for rank in missing})
    who = ", ".join(map(str, sorted(missing)))
    seconds = asked.distributed_timeout_seconds or JOIN_S
    return (
        f"ranks {who} of machines {', '.join(map(str, nodes))} did not come to"
        f" {asked.master_addr}:{asked.master_port} within {seconds:g} s; run there: quire join"
        f" --master-addr {asked.master_addr} --master-port {asked.master_port}"
        f" --nnodes {asked.nnodes} --node-rank N"
    )


def _listener(asked: Parallel) -> socket.socket:
    at = asked.master_addr, asked.master_port
    try:
        return socket.create_server(at, reuse_port=False)
    except OSError as error:
        raise NotSupported(
            f"cannot listen at master_addr={at[0]!r}, master_port={at[1]}: {error}; name an address"
            " of this machine that the others reach, and a free port"
        ) from error


def _admit(link: socket.socket, asked: Parallel, secret: bytes, missing: set[int]) -> int | None:
    """The rank that came; None: a machine that asked. Raises for whoever is not let in."""
    link.settimeout(GREET_S)
    greet(link, secret)
    answer_greeting(link, secret)
    body = receive(link)
    if body is None:
        raise EngineDead("it left without a word")
    hello = hellos().decode(body)
    why = _objection(hello, asked, missing)
    if why:
        link.sendall(replies().frame(Refused(why)))
        raise EngineDead(why)
    link.sendall(replies().frame(Places(ranks_on(asked, hello.node))))
    _keep_alive(link)
    return hello.rank


def _objection(hello: Hello, asked: Parallel, missing: set[int]) -> str:
    if hello.version != __version__:
        return f"got version {hello.version}, want {__version__}"
    if hello.num_nodes != asked.nnodes or not 0 < hello.node < asked.nnodes:
        return (
            f"got node_rank={hello.node} of nnodes={hello.num_nodes}, want one of 1 to"
            f" {asked.nnodes - 1} of nnodes={asked.nnodes}"
        )
    if not missing & set(ranks_on(asked, hello.node)):
        return f"the ranks of node_rank={hello.node} are all here already"
    if hello.rank is not None and hello.rank not in missing:
        return f"rank {hello.rank} is here already, or another machine's"
    return ""


def come(asked: Parallel, rank: int | None) -> tuple[socket.socket, tuple[int, ...]]:
    """To the first machine, as one of our ranks or to ask which they are. Raises RankLost."""
    secret, at = secret_of(asked), (asked.master_addr, asked.master_port)
    until = time.monotonic() + (asked.distributed_timeout_seconds or JOIN_S)
    while True:
        try:
            link = socket.create_connection(at, timeout=GREET_S)
            break
        except OSError as error:
            if time.monotonic() > until:
                raise RankLost(
                    f"nobody listens at {at[0]}:{at[1]}: {error}; start the first machine there"
                ) from error
            time.sleep(RETRY_S)
    try:
        answer_greeting(link, secret)
        greet(link, secret)
        hello = Hello(asked.node_rank, asked.nnodes, __version__, rank)
        link.sendall(hellos().frame(hello))
        body = receive(link)
        reply = None if body is None else replies().decode(body)
    except (TransferError, EngineDead, OSError) as error:
        raise RankLost(f"{at[0]}:{at[1]} does not let us in: {error}") from error
    if not isinstance(reply, Places):
        why = reply.why if reply else "it has another secret, or left"
        raise RankLost(f"{at[0]}:{at[1]} does not let us in: {why}")
    link.settimeout(None)
    _keep_alive(link)
    return link, reply.ranks


def _keep_alive(link: socket.socket) -> None:
    """A machine that is gone without a word is noticed all the same, within a minute."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
