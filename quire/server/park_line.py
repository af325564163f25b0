"""ParkLine: one command of the supervisor's to an engine, and its answer when it comes.

It connects as an API process does, and hangs up when it has the answer. Nobody waits: the fleet
looks at every tick.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

from quire.engine import commands as msg
from quire.engine.commands import Command, Report
from quire.engine.wire import Codec, Frames
from quire.errors import EngineDead

CONNECT_S = 1.0
READ_BYTES = 1 << 20
NUMBER = 1


class ParkLine:
    def __init__(self, address: Path, parks: bool) -> None:
        """Park, or unpark. Raises OSError when nobody listens."""
        self.parks, self.since = parks, time.monotonic()
        self._socket, self._frames = socket.socket(socket.AF_UNIX), Frames()
        self._reports: Codec[Report] = Codec(Report)
        commands: Codec[Command] = Codec(Command)
        command = msg.Park(NUMBER) if parks else msg.Unpark(NUMBER)
        try:
            self._socket.settimeout(CONNECT_S)
            self._socket.connect(str(address))
            self._socket.sendall(commands.frame(command))
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def poll(self) -> msg.Reply | None:
        """The answer, once it is there. Raises OSError or EngineDead when none can come."""
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return None
        if not data:
            raise EngineDead("the engine hung up")
        for body in self._frames.feed(data):
            report = self._reports.decode(body)
            if isinstance(report, msg.Reply):
                return report
        return None

    def close(self) -> None:
        self._socket.close()
