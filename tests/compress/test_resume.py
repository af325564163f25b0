"""A run may die at any moment: nothing half-written is taken for whole, and the next goes on."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quire.compress import output
from quire.compress.pipeline import Progress, compress
from quire.errors import BadRequest, QuireError
from tests.compress.models import job, run, small


class Died(BaseException):
    """What ends a process ends it everywhere."""


def files(folder: Path) -> dict[str, bytes]:
    kept = [path for path in folder.iterdir() if path.name != output.REPORT]  # has times
    return {path.name: path.read_bytes() for path in kept}


def die_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The process ends when it forces a file to the disk for the n-th time; nobody tidies up."""
    calls = iter(range(10_000))
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if next(calls) == number:
            raise Died
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)


@pytest.mark.parametrize("method", ["gptq", "gguf", "sparsegpt", "shrink", "codebook"])
def test_dying_at_every_write(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a shard counts before it is whole, or what comes after a resume has other bits."""
    model = small(tmp_path, num_hidden_layers=1)
    others: dict[str, Any] = {"gguf": {"storage": "Q4_0"}, "shrink": {"mlp": 48, "keep": ()}}
    more = others.get(method, {})
    run(model, tmp_path / "whole", method, **more)
    want, number = files(tmp_path / "whole"), 0
    while True:
        out = tmp_path / f"died-{number}"
        with monkeypatch.context() as patch:
            die_at(patch, number)
            try:
                run(model, out, method, **more)
            except Died:
                if (out / "config.json").exists():  # then all that it speaks of is there
                    assert want.items() <= files(out).items()
            else:
                break  # it has no more files to write
        run(model, out, method, **more)
        got = {name: data for name, data in files(out).items() if not name.endswith("unfinished")}
        assert got == want, number
        number += 1
    assert number > 6


def test_blocks_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    """Red when a resume starts over."""
    model, seen = small(tmp_path), []

    def stop(progress: Progress) -> None:
        seen.append(progress)
        if progress.done == 1:
            raise Died

    with pytest.raises(Died):
        compress(job(model, tmp_path / "out", "gptq"), stop)
    shard = tmp_path / "out" / "model-00002-of-00003.safetensors"
    before = shard.stat().st_mtime_ns
    compress(job(model, tmp_path / "out", "gptq"), seen.append)
    assert shard.stat().st_mtime_ns == before
    assert [p.is_resumed for p in seen] == [False, True, False]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """Red when options are mixed in one model, or a user's files are written over."""
    model = small(tmp_path)
    with pytest.raises(Died):
        compress(job(model, tmp_path / "out", "gptq"), lambda progress: die())
    with pytest.raises(BadRequest, match="begun with another model, method or calibration"):
        run(model, tmp_path / "out", "gptq", bits=8)
    run(model, tmp_path / "done", "rtn")
    with pytest.raises(BadRequest, match="is not empty"):
        run(model, tmp_path / "done", "rtn")


def die() -> None:
    raise Died


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a full disk ends in a trace, a torn shard or a run that cannot go on."""
    model = small(tmp_path)

    def full(file: Any, tensors: Any) -> int:
        file.write(b"some of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(output, "write_tensors", full)
        with pytest.raises(QuireError, match=r"No space left.*run the same command again"):
            run(model, tmp_path / "out", "rtn")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [output.JOURNAL]
    run(model, tmp_path / "out", "rtn")


def test_no_room_is_known_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a disk that is surely too small is only found out at the end."""
    import shutil

    model, usage = small(tmp_path), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(QuireError, match="are needed; make room"):
        run(model, tmp_path / "out", "rtn")


def test_kill_minus_nine(tmp_path: Path) -> None:
    """Red when a process that is killed outright leaves what cannot be gone on with."""
    model, out = small(tmp_path, num_hidden_layers=8), tmp_path / "out"
    words = ["quantize", str(model), "--method", "gptq", "--group-size", "32", "--no-report"]
    words += ["--out", str(out)]
    words += [
        "--samples",
        "6",
        "--length",
        "32",
        "--calibration",
        str(tmp_path / "calibration.txt"),
    ]
    job(model, out, "gptq")  # writes the text
    child = subprocess.Popen(
        [sys.executable, "-m", "quire", *words],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    until = time.monotonic() + 60
    while not list(out.glob("model-00003*.safetensors")) and time.monotonic() < until:
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (out / "config.json").exists()
    run(model, out, "gptq")
    run(model, tmp_path / "whole", "gptq")
    assert files(out) == files(tmp_path / "whole")
