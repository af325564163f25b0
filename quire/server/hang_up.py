"""Hang up on a client that does not read. No HTTP server offers that: left alone, it waits for the
client to take what was written, holding a file and megabytes of buffers, for as long as it likes.

The connection is found among this process's open files by the address at its other end, and reset,
so that what was not read is thrown away. One pass over the files for any number of clients.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection
from contextlib import suppress

Address = tuple[str, int]

OPEN_FILES = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time at all


def hang_up(clients: Collection[Address]) -> int:
    """Reset the connections whose other ends these are; returns how many were found."""
    wanted, found = set(clients), 0
    for name in os.listdir(OPEN_FILES) if wanted else []:
        with suppress(OSError, ValueError):  # closed meanwhile, or no socket at all
            found += _reset_if(int(name), wanted)
    return found


def _reset_if(number: int, wanted: set[Address]) -> bool:
    copy = os.dup(number)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return False
    with connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if tuple(connection.getpeername()[:2]) not in wanted:
            return False
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.shutdown(socket.SHUT_RDWR)  # its owner wakes up, sees the end and closes
        return True
