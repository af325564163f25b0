"""HttpClient: requests to one upstream over kept-alive connections, answers as they arrive.

HTTP/1.1 by h11 over asyncio streams. A connection that the upstream closed while it was idle is
replaced without a word; any other failure before the answer's head raises `NotAnswered`, which
says whether the request can have reached the upstream.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import h11

from quire.router.settings import UpstreamAddress

Headers = Sequence[tuple[bytes, bytes]]
READ_BYTES = 1 << 16
MOST_IDLE = 256
# They speak of one connection, not of the message.
HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"proxy-connection"),
    )
)


class NotAnswered(Exception):
    def __init__(self, reason: str, was_sent: bool) -> None:
        super().__init__(reason)
        self.was_sent = was_sent


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    http: h11.Connection
    is_reused: bool = False

    async def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while True:
            event = self.http.next_event()
            if event is not h11.NEED_DATA:
                return event
            self.http.receive_data(await self.reader.read(READ_BYTES))

    def close(self) -> None:
        with suppress(Exception):
            self.writer.transport.abort()


class Answer:
    """Status and headers; `chunks` gives the body. Close it when done, or before."""

    def __init__(self, client: HttpClient, connection: _Connection, head: h11.Response) -> None:
        self.status = int(head.status_code)
        self.headers = [(bytes(n), bytes(v)) for n, v in head.headers if n not in HOP_BY_HOP]
        self._client, self._connection = client, connection
        self._is_over = False

    async def chunks(self) -> AsyncIterator[bytes]:
        """Raises OSError or h11.RemoteProtocolError when the upstream breaks off."""
        while True:
            event = await self._connection.next_event()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                self._is_over = True
                return
            else:
                raise h11.RemoteProtocolError(f"the answer broke off: {event!r}")

    async def body(self) -> bytes:
        return b"".join([part async for part in self.chunks()])

    def close(self) -> None:
        if self._is_over:
            self._client.give_back(self._connection)
        else:
            self._connection.close()
        self._is_over = False


class HttpClient:
    def __init__(self, address: UpstreamAddress, connect_s: float) -> None:
        self.address, self.connect_s = address, connect_s
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if address.is_tls else None

    async def send(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes = b"",
        more: AsyncIterator[bytes] | None = None,
        head_s: float = 60.0,
    ) -> Answer:
        """`more`: what follows `body`, with a Content-Length in `headers`. Raises NotAnswered."""
        while True:
            connection = await self._connect()
            try:
                return await asyncio.wait_for(
                    self._exchange(connection, method, target, headers, body, more), head_s
                )
            except _GoneWhileIdle:
                connection.close()  # try with another one
            except (OSError, h11.ProtocolError, asyncio.IncompleteReadError) as error:
                connection.close()
                why = str(error) or type(error).__name__
                raise NotAnswered(f"{self.address.name}: {why}", was_sent=True) from None
            except TimeoutError:
                connection.close()
                why = f"{self.address.name} gave no answer within {head_s:g} s"
                raise NotAnswered(why, was_sent=True) from None
            except BaseException:
                connection.close()
                raise

    async def _connect(self) -> _Connection:
        while self._idle:
            kept = self._idle.pop()
            if not kept.writer.is_closing() and not kept.reader.at_eof():
                kept.is_reused = True
                return kept
            kept.close()
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(self.address.host, self.address.port, ssl=self._tls),
                self.connect_s,
            )
        except (OSError, TimeoutError) as error:
            why = str(error) or f"no connection within {self.connect_s:g} s"
            raise NotAnswered(f"{self.address.name}: {why}", was_sent=False) from None
        return _Connection(reader, writer, h11.Connection(h11.CLIENT))

    async def _exchange(
        self,
        connection: _Connection,
        method: str,
        target: str,
        headers: Headers,
        body: bytes,
        more: AsyncIterator[bytes] | None,
    ) -> Answer:
        host = self.address.host
        host = f"[{host}]" if ":" in host else host
        host_header = (b"host", f"{host}:{self.address.port}".encode())
        kept = [(n, v) for n, v in headers if n not in HOP_BY_HOP and n not in (b"host", b"expect")]
        if more is None:
            kept = [(n, v) for n, v in kept if n != b"content-length"]
            kept.append((b"content-length", str(len(body)).encode()))
        http, writer = connection.http, connection.writer
        request = h11.Request(
            method=method, target=self.address.base + target, headers=[host_header, *kept]
        )
        try:
            writer.write(http.send(request) or b"")
            if body:
                writer.write(http.send(h11.Data(body)) or b"")
            if more is not None:
                async for part in more:
                    writer.write(http.send(h11.Data(part)) or b"")
                    await writer.drain()
            writer.write(http.send(h11.EndOfMessage()) or b"")
            await writer.drain()
            event = await connection.next_event()
        except (OSError, h11.RemoteProtocolError):
            if connection.is_reused and more is None and not connection.http.trailing_data[0]:
                raise _GoneWhileIdle from None
            raise
        while isinstance(event, h11.InformationalResponse):
            event = await connection.next_event()
        if isinstance(event, h11.ConnectionClosed) and connection.is_reused and more is None:
            raise _GoneWhileIdle
        if not isinstance(event, h11.Response):
            raise h11.RemoteProtocolError("the connection was closed before an answer")
        return Answer(self, connection, event)

    def give_back(self, connection: _Connection) -> None:
        http = connection.http
        if http.our_state is h11.DONE and http.their_state is h11.DONE:
            with suppress(h11.ProtocolError):
                http.start_next_cycle()
                if len(self._idle) < MOST_IDLE:
                    self._idle.append(connection)
                    return
        connection.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _GoneWhileIdle(Exception):
    """The upstream had closed a kept connection; nothing of the request was read."""
