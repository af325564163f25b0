"""Output: the folder a model is written to, shard by shard, and taken up again.

A shard is written under another name, forced to the disk and renamed; only then does the journal
get its line. So what the journal names is whole, whenever the process dies. `config.json` comes
last: without it no reader takes the folder for a model. The same command again goes on after the
last line of the journal, if it asks for the same thing.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from quire.compress.safetensors_file import write_tensors
from quire.errors import BadRequest, QuireError

JOURNAL = "compress.journal"
REPORT = "compress.json"
UNFINISHED = ".unfinished"  # at the end of a name


def _pass(path: Path) -> None:
    """No check."""


def is_done(folder: Path) -> bool:
    """The report is written after the weights, and the journal goes last."""
    return (folder / REPORT).exists() and not (folder / JOURNAL).exists()


@dataclass(slots=True)
class Output:
    folder: Path
    num_shards: int
    records: dict[int, dict[str, Any]] = field(default_factory=dict)  # by shard

    @staticmethod
    def open(folder: Path, asked: Mapping[str, Any], num_shards: int) -> Output:
        """Begin, or go on where the journal ends. Raises BadRequest if the folder is not ours."""
        made = Output(folder, num_shards)
        with told(folder):
            folder.mkdir(parents=True, exist_ok=True)
        if not (folder / JOURNAL).exists():
            if any(folder.iterdir()):
                raise BadRequest(f"{folder} is not empty; give --out a new folder", param="out")
            made._append({"asked": dict(asked)})
            return made
        lines = _lines(folder / JOURNAL)
        if not lines or lines[0].get("asked") != json.loads(json.dumps(dict(asked))):
            raise BadRequest(
                f"{folder} holds what was begun with another model, method or calibration; give"
                " --out a new folder, or the same options as before",
                param="out",
            )
        for record in lines[1:]:
            shard = record.get("shard")
            if isinstance(shard, int) and made._is_whole(shard, record):
                made.records[shard] = record
        made._rewrite([lines[0], *made.records.values()])
        return made

    @property
    def is_resumed(self) -> bool:
        return bool(self.records)

    def path(self, shard: int) -> Path:
        return self.folder / self.name(shard)

    def name(self, shard: int) -> str:
        return f"model-{shard + 1:05}-of-{self.num_shards:05}.safetensors"

    def write_shard(self, shard: int, tensors: Mapping[str, Tensor]) -> int:
        """Its bytes. It counts once it is noted."""
        with self.writing(self.path(shard)) as file:
            return write_tensors(file, tensors)

    def note(
        self, shard: int, size: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]
    ) -> None:
        """The shard is whole."""
        names = {name: _num_bytes(tensor) for name, tensor in tensors.items()}
        self.records[shard] = {"shard": shard, "bytes": size, "tensors": names, **record}
        self._append(self.records[shard])

    def finish(
        self, config: Mapping[str, Any], files: Mapping[str, bytes], report: Mapping[str, Any]
    ) -> None:
        """Everything but weights; the config last."""
        weight_map = {
            name: self.name(shard)
            for shard, record in sorted(self.records.items())
            for name in record["tensors"]
        }
        total = sum(sum(record["tensors"].values()) for record in self.records.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        self.write("model.safetensors.index.json", _json(index))
        for name, data in files.items():
            self.write(name, data)
        self.write(REPORT, _json(report))
        self.write("config.json", _json(config))
        (self.folder / JOURNAL).unlink()

    def write(self, name: str, data: bytes) -> None:
        with self.writing(self.folder / name) as file:
            file.write(data)

    def check_room(self, num_bytes: int) -> None:
        """Raises QuireError where the disk has fewer bytes than are still to be written."""
        free = shutil.disk_usage(self.folder).free
        if num_bytes > free:
            raise QuireError(
                f"{self.folder} has {free / 1e9:.2f} GB free, about {num_bytes / 1e9:.2f} GB are"
                " needed; make room, or give --out a folder on another disk"
            )

    def abandon_shards(self, report: Mapping[str, Any]) -> None:
        """Where what they held is in another file by now."""
        self.write(REPORT, _json(report))
        (self.folder / JOURNAL).unlink()
        for shard in self.records:
            self.path(shard).unlink(missing_ok=True)

    @contextmanager
    def writing(self, path: Path, check: Callable[[Path], None] = _pass) -> Iterator[IO[bytes]]:
        """A file that has its name only once it is whole, and `check` has raised nothing."""
        unfinished = path.with_name(path.name + UNFINISHED)
        with told(path):
            try:
                with unfinished.open("wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                check(unfinished)
                unfinished.rename(path)
                _sync_folder(self.folder)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise

    def _append(self, record: Mapping[str, Any]) -> None:
        path = self.folder / JOURNAL
        with told(path), path.open("ab") as file:
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _rewrite(self, lines: list[dict[str, Any]]) -> None:
        """Without lines that were cut off or whose shards are gone."""
        self.write(JOURNAL, b"".join(json.dumps(line).encode() + b"\n" for line in lines))

    def _is_whole(self, shard: int, record: Mapping[str, Any]) -> bool:
        path = self.path(shard)
        return path.is_file() and path.stat().st_size == record.get("bytes")


def _lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines; the last may have been cut off."""
    found = []
    for line in path.read_bytes().split(b"\n"):
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return [record for record in found if isinstance(record, dict)]


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _sync_folder(folder: Path) -> None:
    """A rename is only safe once the folder itself is on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def told(path: Path) -> Iterator[None]:
    """A disk's refusal as a sentence."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way = (
            "make room and run the same command again: it goes on where it stopped"
            if is_full
            else "choose a folder that can be written"
        )
        raise QuireError(f"cannot write {path}: {error.strerror}; {way}") from error
