"""Wire: msgspec structs as length-prefixed msgpack frames over a stream socket. Never pickle.

    frame = length of what follows, uint32 little endian | version, uint8 | msgpack of one message

Both ends belong to us and talk over a unix socket, yet every frame is bounded and typed. A frame
that is too long, of another version or not a known message ends the connection and nothing else.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

from quire.errors import BadRequest, EngineDead

VERSION = 1
MAX_FRAME = 64 << 20
_HEAD = struct.Struct("<IB")

T = TypeVar("T")


class Codec(Generic[T]):
    """Frames of one union of messages, in one direction."""

    def __init__(self, messages: Any) -> None:
        """`messages` is the union of all T, which has no type of its own for the checker."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(messages)

    def frame(self, message: T) -> bytes:
        """Raises BadRequest for what only a client can have put into a message."""
        try:
            body = self._encoder.encode(message)
        except OverflowError:
            raise BadRequest("got a whole number beyond 64 bits, want a smaller one") from None
        assert len(body) <= MAX_FRAME, f"a message of {len(body)} bytes"
        return _HEAD.pack(len(body), VERSION) + body

    def decode(self, body: bytes) -> T:
        try:
            message: T = self._decoder.decode(body)
            return message
        except (msgspec.DecodeError, ValueError) as error:  # ValueError: a value refused itself
            raise EngineDead(f"the other process sent what is no message: {error}") from error


def check_head(head: bytes | bytearray) -> int:
    """Length of the body that follows; raises EngineDead on nonsense."""
    length, version = _HEAD.unpack(head)
    if version != VERSION or length > MAX_FRAME:
        raise EngineDead(
            f"got a frame of version {version} and {length} bytes,"
            f" want version {VERSION} and at most {MAX_FRAME}"
        )
    return int(length)


def receive(connection: socket.socket) -> bytes | None:
    """One frame's body, blocking; None when the other side is gone."""
    head = _exactly(connection, _HEAD.size)
    return None if head is None else _exactly(connection, check_head(head))


def is_readable(connection: socket.socket, seconds: float) -> bool:
    """Whether something has come, or the end, within so many seconds. Unlike `select` it takes any
    number of open files. Raises ValueError when we closed it ourselves."""
    looked_at = select.poll()
    looked_at.register(connection, select.POLLIN)
    return bool(looked_at.poll(seconds * 1e3))


class Frames:
    """Bytes in as they come, whole frames' bodies out."""

    def __init__(self) -> None:
        self._buffer = bytearray()  # from the first byte of a frame on

    def feed(self, data: bytes) -> list[bytes]:
        """Raises EngineDead on nonsense."""
        buffer, bodies, begin = self._buffer, [], 0
        buffer += data
        while len(buffer) - begin >= _HEAD.size:
            body = begin + _HEAD.size
            end = body + check_head(buffer[begin:body])
            if end > len(buffer):
                break
            bodies.append(bytes(buffer[body:end]))
            begin = end
        del buffer[:begin]
        return bodies


async def receive_async(reader: asyncio.StreamReader) -> bytes | None:
    try:
        length = check_head(await reader.readexactly(_HEAD.size))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts, left = [], count
    while left:
        try:
            part = connection.recv(min(left, 1 << 20))
        except OSError:
            return None
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
