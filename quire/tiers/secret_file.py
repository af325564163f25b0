"""The secret that keys of prefixes are made with, in a file that only its owner can read.

Processes with the same file agree on keys: a restart finds the pages of its forerunner, an engine
those of another. Whoever has the file can tell whether a prefix was seen; nobody else can.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from quire.errors import NotSupported

SECRET_BYTES = 32


def read_secret(path: Path) -> bytes:
    """The secret in `path`, made now if there is no such file. Raises NotSupported or OSError."""
    if not path.exists():
        own = path.with_name(f".{path.name}.{os.getpid()}")
        own.unlink(missing_ok=True)
        with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        try:
            os.link(own, path)  # whole, or not at all: others may be doing the same
        except FileExistsError:
            pass
        finally:
            own.unlink()
    return _read(path)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_IMODE(mode) & 0o077:
            raise NotSupported(
                f"{path} can be read by others (mode {stat.S_IMODE(mode):o}): whoever reads it can"
                f" tell which prompts were seen; run chmod 600 {path}"
            )
        secret = file.read(SECRET_BYTES + 1)
    if len(secret) != SECRET_BYTES:
        raise NotSupported(
            f"{path} holds {len(secret)} bytes, want {SECRET_BYTES}: it is no secret of ours, or"
            " was cut short; remove it, and pages kept under it are forgotten"
        )
    return secret
