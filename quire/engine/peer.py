"""Peer: one API process at the other end of a unix socket, as the engine process sees it.

A reader thread turns frames into commands. Reports go out at once; what the socket has no room for
a writer thread sends, so that neither a slow peer nor a large frame ever holds a step. `process.py`
acts on what comes in.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from quire.engine import commands as msg
from quire.engine.commands import Command, Report
from quire.engine.wire import Codec, receive
from quire.errors import EngineDead
from quire.obs.log import log_event
from quire.request import BACKGROUND

ID_BITS = 40  # of request ids within one connection
MAX_UNSENT = 256 << 20  # bytes a peer may leave unread before it counts as gone


class Peer:
    """One connected API process. Its requests have ids from number << ID_BITS on."""

    def __init__(
        self,
        connection: socket.socket,
        wake: Callable[[], None],
        number: int,
        urge: Callable[[], None] = lambda: None,
    ) -> None:
        """`urge` is called when a request comes that somebody waits for."""
        self.number, self.watch_hz = number, 0.0
        self.inbox: deque[Command] = deque()
        self.is_gone = False
        self._connection, self._wake, self._urge = connection, wake, urge
        self._codec: Codec[Report] = Codec(Report)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._unsent, self._counting = 0, threading.Lock()
        for work in (self._read, self._write):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def send(self, report: Report) -> None:
        frame = self._codec.frame(report)
        with self._counting:
            if not self._unsent:  # the writer sleeps: waking it costs more than sending
                frame = self._unsent_of(frame)
            self._unsent += len(frame)
            is_too_slow = self._unsent > MAX_UNSENT
            if frame and not is_too_slow:
                self._outbox.put(frame)
        if is_too_slow:
            log_event("peer_too_slow", severity=logging.ERROR, unsent_bytes=self._unsent)
            self.close()

    def _unsent_of(self, frame: bytes) -> bytes:
        """Send what the socket has room for; returns the rest."""
        try:
            return frame[self._connection.send(frame, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return frame
        except OSError:  # gone, as the reader will find
            return b""

    def reply(self, number: int, value: msg.Value = None, error: str | None = None) -> None:
        self.send(msg.Reply(number, value, error))

    def close(self) -> None:
        self.is_gone = True
        self._outbox.put(None)
        with suppress(OSError):  # it may be gone already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._wake()

    def _read(self) -> None:
        codec: Codec[Command] = Codec(Command)
        try:
            while (body := receive(self._connection)) is not None:
                command = codec.decode(body)
                self.inbox.append(command)
                if isinstance(command, msg.Submit) and command.priority != BACKGROUND:
                    self._urge()
                self._wake()
        except EngineDead as error:
            log_event("bad_frame", severity=logging.ERROR, reason=str(error))
        finally:
            self.close()

    def _write(self) -> None:
        while (frame := self._outbox.get()) is not None:
            try:
                self._connection.sendall(frame)
            except OSError:
                break
            with self._counting:
                self._unsent -= len(frame)
        self._connection.close()


def listen(address: Path) -> socket.socket:
    """A unix socket only this user can reach (its folder is 0700)."""
    address.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(address))
    os.chmod(address, 0o600)
    listener.listen(64)
    return listener
