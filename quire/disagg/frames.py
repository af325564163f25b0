"""Frames of the page exchange: fixed structures of numbers and bytes, bounded and typed.

    frame = kind, u8 | bytes that follow, u64 | body

Both sides prove that they know the secret before anything else is said, and every page comes with
a keyed digest of its key, ids and bytes. A frame of another kind than the one that is due, or
longer than it may be, ends the connection.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time

from quire.errors import TransferError
from quire.kv.tier_index import Buffer

HELLO, PROOF, PULL, PAGE, END, CONFIRM, ANSWER, SPOT, PLACE = range(1, 10)
GREETING = b"quire kv 1"
NONCE_BYTES, DIGEST_BYTES, KEY_BYTES = 32, 32, 64
SMALL = 1 << 16  # bytes that are copied rather than sent on their own
_HEAD = struct.Struct("<BQ")
_LEASE = struct.Struct("<32sQ")


def send(connection: socket.socket, kind: int, *parts: bytes | Buffer) -> None:
    small = bytearray(_HEAD.pack(kind, sum(map(len, parts))))
    for part in parts:
        if len(part) <= SMALL:  # one packet: the other side is woken once
            small += part
        else:
            connection.sendall(small)
            connection.sendall(part)
            small = bytearray()
    if small:
        connection.sendall(small)


def receive(
    connection: socket.socket, kind: int, most: int, deadline: float | None = None
) -> bytearray:
    """The body of the next frame; `deadline` of time.monotonic for all of it. Raises TransferError,
    or OSError when the other side is gone."""
    body = bytearray(expect(connection, kind, most, deadline))
    fill(connection, body, deadline)
    return body


def expect(connection: socket.socket, kind: int, most: int, deadline: float | None = None) -> int:
    """The length of the next frame's body, which stays to be received."""
    head = bytearray(_HEAD.size)
    fill(connection, head, deadline)
    found, length = _HEAD.unpack(head)
    if found != kind or length > most:
        raise TransferError(
            f"got a frame of kind {found} and {length} bytes, want kind {kind} and at most {most}"
        )
    return int(length)


def kind_ahead(connection: socket.socket) -> int:
    """The kind of the next frame, which stays to be received; 0: the other side has left."""
    first = connection.recv(1, socket.MSG_PEEK)
    return first[0] if first else 0


def fill(connection: socket.socket, data: Buffer, deadline: float | None = None) -> None:
    """Receive the next bytes into this, all of it."""
    view, at = memoryview(data), 0
    while at < len(view):
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        got = connection.recv_into(view[at:])
        if got == 0:
            raise TransferError("the other engine closed the connection")
        at += got


# ---------------------------------------------------------------- who is there


def greet(connection: socket.socket, secret: bytes, seconds: float | None = None) -> None:
    """The side that listens: let in whoever knows the secret and, where it counts, says so in
    time."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    send(connection, HELLO, GREETING, nonce)
    before = connection.gettimeout()
    deadline = None if seconds is None else time.monotonic() + seconds
    proof = receive(connection, PROOF, DIGEST_BYTES, deadline)
    connection.settimeout(before)
    if not hmac.compare_digest(proof, _proof(secret, nonce)):
        raise TransferError(
            "the other engine has another secret, model, form of the cache or version"
        )


def answer_greeting(connection: socket.socket, secret: bytes) -> None:
    hello = bytes(receive(connection, HELLO, len(GREETING) + NONCE_BYTES))
    if not hello.startswith(GREETING):
        raise TransferError(f"got {hello[:16]!r}, want {GREETING!r}: no engine of this version")
    send(connection, PROOF, _proof(secret, hello[len(GREETING) :]))


def _proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, GREETING + nonce, "sha256")


# ---------------------------------------------------------------- bodies


def lease_body(lease: str, generation: int) -> bytes:
    return _LEASE.pack(lease.encode(), generation)


def read_lease(body: bytes | bytearray) -> tuple[str, int]:
    if len(body) != _LEASE.size:
        raise TransferError(f"got {len(body)} bytes for a lease, want {_LEASE.size}")
    name, generation = _LEASE.unpack(body)
    return name.decode("ascii", "replace"), generation
