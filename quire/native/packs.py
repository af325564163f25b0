"""Packs: weights packed into panels at an earlier start, kept in the cache folder.

A pack's name holds a digest of all that decides its bytes (`engine/pack_identity.py`), so a changed
file or a new version never meets an old pack. Whatever goes wrong with the folder, the engine packs
weights as if there were none, and `note` says why. The packs used last stay, up to a size in all.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from quire.native.pack_file import DamagedPack, PackFile, write_pack
from quire.native.panels import Panels

LEAST_BYTES = 16 << 20  # smaller models are packed in no time
MAX_AGE_S = 30 * 86400  # unused for so long, a pack goes


@dataclass(frozen=True, slots=True)
class Shelf:
    """Where packs are, and how many bytes they may have in all; 0: none are kept."""

    folder: Path
    limit: int

    def make_room(self, num_bytes: int, kept: Path) -> None:
        """Packs used longest ago go first. The caller holds the lock: half-written files that lie
        here are nobody's."""
        for path in self.folder.glob("*.part"):
            path.unlink(missing_ok=True)
        left, oldest = self.limit - num_bytes, time.time() - MAX_AGE_S
        for used, size, path in sorted(self._packs(), reverse=True):
            left -= size
            if path != kept and (left < 0 or used < oldest):
                path.unlink(missing_ok=True)  # whoever has it mapped keeps it

    def _packs(self) -> Iterator[tuple[float, int, Path]]:
        for path in self.folder.glob("*.pack"):
            with suppress(OSError):
                found = path.stat()
                yield found.st_mtime, found.st_size, path

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """False: another process is writing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


class Packs:
    """The pack of one model: found, or to be written from what is packed now."""

    def __init__(self, shelf: Shelf, name: str, identify: Callable[[], str | None]) -> None:
        """`identify` gives the digest; None: files changed just now and may change again."""
        self._shelf, self._identify = shelf, identify
        self.note = "packed now"
        self._made: dict[str, tuple[Panels, ...]] = {}
        self._found: PackFile | None = None
        identity = identify() if shelf.limit else None
        self.path = None if identity is None else shelf.folder / f"{name}-{identity}.pack"
        if self.path is not None:
            self._open(self.path)

    @property
    def is_found(self) -> bool:
        return self._found is not None

    def find(self, name: str) -> list[Panels] | None:
        return None if self._found is None else self._found.find(name)

    def add(self, name: str, parts: Sequence[Panels]) -> None:
        if self.path is not None and self._found is None:
            self._made[name] = tuple(parts)

    def save(self) -> None:
        """All weights are packed: write them down, and from then on read them there. What knows the
        model's files is let go."""
        made, self._made = self._made, {}
        found, self._found = self._found, None  # panels hold the pages that they read
        if found is None:
            self._write_down(made)
        self._identify = _unknown

    def _write_down(self, made: dict[str, tuple[Panels, ...]]) -> None:
        num_bytes = sum(part.num_bytes for parts in made.values() for part in parts)
        if self.path is None or num_bytes < LEAST_BYTES:
            return
        reason = self._save(self.path, made, num_bytes)
        if reason is not None:
            self.note = f"packed now; not kept: {reason}"
            return
        found, self._found = self._found, None
        if found is not None:  # the pages take the place of what is packed now
            for name, parts in made.items():
                for part, mapped in zip(parts, found.find(name) or (), strict=True):
                    part.move(mapped.tensors)
            self.note = f"packed now, mapped at the next start: {self.path}"

    def _save(self, path: Path, made: dict[str, tuple[Panels, ...]], num_bytes: int) -> str | None:
        """Why not, in a few words."""
        if num_bytes > self._shelf.limit:
            return f"{num_bytes} bytes, {self._shelf.limit} are the most (QUIRE_PACK_GIB)"
        try:
            with self._shelf.locked() as is_ours:
                if not is_ours:
                    return "another process is writing one"
                self._shelf.make_room(num_bytes, path)
                if not path.exists():
                    _check_disk(path.parent, 2 * num_bytes)
                    if not path.stem.endswith(self._identify() or "?"):
                        return "the model's files changed meanwhile"
                    _write(path, made)
            self._open(path)
        except OSError as error:
            return f"{error.strerror or error}, in {self._shelf.folder}"
        return None if self._found is not None else self.note

    def _open(self, path: Path) -> None:
        try:
            self._found = PackFile.open(path)
        except FileNotFoundError:
            return
        except DamagedPack as error:
            self.note = f"packed now: {path} is damaged: {error}"
            with suppress(OSError):
                path.unlink()
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.note = f"packed now: {path} cannot be read: {error}"
            return
        self.note = f"mapped from {path}"
        with suppress(OSError):  # a folder that cannot be written still serves
            os.utime(path)


def _unknown() -> str | None:
    return None


def _check_disk(folder: Path, num_bytes: int) -> None:
    if (free := shutil.disk_usage(folder).free) < num_bytes:
        raise OSError(f"{free} bytes are free, want {num_bytes}")


def _write(path: Path, made: dict[str, tuple[Panels, ...]]) -> None:
    """To a file of its own, moved into place once it is on the disk."""
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f"{path.stem}-", suffix=".part", delete=False
    ) as file:
        try:
            write_pack(cast("BinaryIO", file), made)
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
