"""A run may die at any moment: the next one goes on, and its bits are those of one that did not."""

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

from quire.distill import answers, state, teacher
from quire.distill.loop import distil
from quire.errors import BadRequest, QuireError
from tests.distill.case import SHAPES, Died, dies_at, job, run, silent, target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target(tmp_path_factory.mktemp("distill"))


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", SHAPES)
def test_going_on_gives_the_same_bits(kind: str, model: Path, tmp_path: Path) -> None:
    """Red when moments, the schedule or the order of answers are not where they were."""
    run(model, tmp_path / "whole", SHAPES[kind])
    for step in (1, 3, 5):
        with pytest.raises(Died):
            distil(job(model, tmp_path / "parts", SHAPES[kind]), dies_at(step))
    report = run(model, tmp_path / "parts", SHAPES[kind])
    assert report["resumed_at"] == 4
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_own_answers_are_the_same_after_a_kill(model: Path, tmp_path: Path) -> None:
    """Red when a resumed student writes its answers with other weights than it had."""
    changes = {"own_share": 0.5, "steps": 10, "save_every": 3}
    run(model, tmp_path / "whole", SHAPES["draft_model"], **changes)
    with pytest.raises(Died):
        distil(job(model, tmp_path / "parts", SHAPES["draft_model"], **changes), dies_at(8))
    run(model, tmp_path / "parts", SHAPES["draft_model"], **changes)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_dying_at_every_write(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a state, answers or a result count before they are whole."""
    shape = SHAPES["early_exit"]
    run(model, tmp_path / "whole", shape, steps=3)
    number, real = 0, os.fsync
    while True:
        out = tmp_path / f"died-{number}"
        calls = iter(range(10_000))

        def fsync(descriptor: int, calls: Any = calls, number: int = number) -> None:
            if next(calls) == number:
                raise Died
            real(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
            try:
                run(model, out, shape, steps=3)
            except Died:
                if (out / "config.json").exists():
                    assert weights(out) == weights(tmp_path / "whole")
            else:
                break
        run(model, out, shape, steps=3)
        assert weights(out) == weights(tmp_path / "whole"), number
        number += 1
    assert number > 6


def test_kill_minus_nine(model: Path, tmp_path: Path) -> None:
    """Red when a process that is killed outright leaves what cannot be gone on with."""
    out = tmp_path / "out"
    words = ["distill", str(model), "--kind", "early_exit", "--layers", "1", "--out", str(out)]
    words += ["--answers", "9", "--tokens", "12", "--batch", "2", "--steps", "150"]
    words += ["--save-every", "2", "--learning-rate", "0.003", "--warmup", "2", "--threads", "1"]
    words += ["--device", "cpu"]
    child = subprocess.Popen(
        [sys.executable, "-m", "quire", *words],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    state = out / "work" / "state.safetensors"
    until = time.monotonic() + 60
    while not state.exists() and time.monotonic() < until and child.poll() is None:
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (out / "config.json").exists()
    changes = {"steps": 150}
    report = distil(job(model, out, SHAPES["early_exit"], **changes), silent)
    assert report["resumed_at"] > 0
    run(model, tmp_path / "whole", SHAPES["early_exit"], **changes)
    assert weights(out) == weights(tmp_path / "whole")


def test_a_folder_of_something_else_is_left_alone(model: Path, tmp_path: Path) -> None:
    """Red when options are mixed in one run, or a user's files are written over."""
    with pytest.raises(Died):
        distil(job(model, tmp_path / "out", SHAPES["medusa"]), dies_at(2))
    with pytest.raises(BadRequest, match="begun with another target, pupil or schedule"):
        run(model, tmp_path / "out", SHAPES["medusa"], steps=7)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(BadRequest, match="is not empty"):
        run(model, tmp_path / "mine", SHAPES["medusa"])


def test_a_full_disk(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a full disk ends in a trace, or spoils what is gone on with."""
    shape = SHAPES["early_exit"]
    run(model, tmp_path / "whole", shape)

    def full(*given: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(teacher, "write_tensors", full)  # states are read again
        run(model, tmp_path / "unkept", shape)
    assert weights(tmp_path / "unkept") == weights(tmp_path / "whole")
    for place, told in ((answers, "the answers that are missing"), (state, "No space left")):
        with monkeypatch.context() as patch:
            patch.setattr(place, "_line" if place is answers else "write_tensors", full)
            with pytest.raises(QuireError, match=told):
                run(model, tmp_path / "out", shape)
    run(model, tmp_path / "out", shape)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
