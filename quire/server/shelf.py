"""Shelf: what the server keeps across restarts, in one folder: files and batches.

One database and one folder of files. Several API processes share it; one of them, whoever holds the
lock file, works on the batches. The lock goes with its process, so another takes over at once.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path

from quire.batches.database import Database
from quire.batches.files import FileStore
from quire.batches.store import BatchStore


class Shelf:
    def __init__(self, folder: Path) -> None:
        """Raises BadRequest for a folder that cannot be used."""
        self.folder = folder
        self.database = Database(folder / "quire.sqlite")
        self.files = FileStore(self.database, folder / "files")
        self.batches = BatchStore(self.database)
        self.wake = asyncio.Event()  # there is news for whoever works on the batches
        self._lock_fd = -1

    def try_own(self) -> bool:
        """Whether this process works on the batches from now on."""
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
