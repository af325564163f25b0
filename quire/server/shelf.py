"""Shelf: what the server keeps across restarts, in one folder: files, batches, conversations.

One database and one folder of files. Several API processes share it; one of them, whoever holds the
lock file, works on batches and on responses in the background. The lock goes with its process, so
another takes over at once.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path

from quire.batches.database import Database
from quire.batches.files import FileStore
from quire.batches.store import BatchStore
from quire.kept.conversations import Conversations
from quire.kept.records import Bounds, Records


class Shelf:
    def __init__(self, folder: Path, bounds: Bounds | None = None) -> None:
        """Raises BadRequest for a folder that cannot be used."""
        self.folder = folder
        self.database = Database(folder / "quire.sqlite")
        self.files = FileStore(self.database, folder / "files")
        self.batches = BatchStore(self.database)
        self.records = Records(self.database, bounds or Bounds(30 * 86_400, 1 << 32))
        self.conversations = Conversations(self.records)
        self.wake = asyncio.Event()  # there is news for whoever works on the batches
        self.wake_responses = asyncio.Event()  # ... on responses in the background
        self._lock_fd = -1

    def try_own(self) -> bool:
        """Whether this process works on what is to be done in the background from now on."""
        if self._lock_fd >= 0:
            return True
        if not os.access(self.folder, os.W_OK):
            return False
        fd = os.open(self.folder / "worker.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._lock_fd = fd
        return True

    def close(self) -> None:
        self.database.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
