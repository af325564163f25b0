"""What verbs say of what they wrote: judged with every pass, and never lost to a kill or a disk."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.compress import chain
from quire.compress.beside import Beside
from quire.compress.calibration import BUILT_IN
from quire.load.known_texts import KnownText
from tests.compress.models import canned, job, small

RECIPE = """
calibration = { file = "calibration.txt", samples = 4, length = 32 }
[[step]]
method = "wanda"
[[step]]
method = "rtn"
group-size = 32
"""
SHORT = ["--samples", "4", "--length", "32"]
VERBS = {
    "prune": ["--method", "magnitude", "--no-reconstruct", *SHORT],
    "quantize": ["--method", "gguf", "--type", "Q4_0", *SHORT],
    "shrink": ["--layers", "1", *SHORT],
    "compress": [],
}


class Died(BaseException):
    """What ends a process ends it everywhere."""


def words_of(verb: str, model: Path, out: Path, held_out: Path, *more: str) -> list[str]:
    text = job(model, out, "wanda").calibration.file
    (model.parent / "recipe.toml").write_text(RECIPE)
    words = [verb, str(model), *VERBS[verb], *more, "--text", str(held_out), "--tokens", "256"]
    words += ["--window", "64", "--device", "cpu", "--out", str(out)]
    if verb == "compress":
        return [*words, "--recipe", str(model.parent / "recipe.toml")]
    return [*words, "--calibration", str(text)]


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    path = tmp_path / "held-out.txt"
    path.write_text(BUILT_IN.read_text(encoding="utf-8")[1000:1600], encoding="utf-8")
    return path


def test_the_report_of_a_command(tmp_path: Path, held_out: Path, capsys: Any) -> None:
    """Red when table, JSON or picture are missing, or the best form of the size is not beside it;
    when a text that it was calibrated on is judged on."""
    model, out = small(tmp_path, dtype="bfloat16"), tmp_path / "out"
    more = ["--method", "wanda", "--pattern", "2:4"]
    words = words_of("prune", model, out, held_out, *more)
    assert main(words) == 0
    said = capsys.readouterr()
    assert "| rtn-int8-g32" in said.out and "KL" in said.out
    assert "of the original's bytes" in said.err
    found = json.loads((out / "report.json").read_text())
    names = [record["name"] for record in found["rows"]]
    assert names == ["original", "out", "rtn-int8-g32", "rtn-int4-g32"]
    assert (out / "report.png").stat().st_size > 1000
    words[words.index(str(held_out))] = str(model.parent / "calibration.txt")
    words[words.index(str(out))] = str(tmp_path / "other")
    assert main(words) == 0
    assert "could not be judged" in capsys.readouterr().err


def test_tasks_of_a_quantised_model(
    tmp_path: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Red when `quire quantize` judges nothing, a task's questions are not asked of every row, or
    a task nobody knows is found when the work is done."""
    lines = [
        json.dumps(
            {
                "task_name": task,
                "doc_id": number,
                "label": number % 2,
                "request": {"context": f"The {number} of it is", "continuation": answer},
            }
        )
        for task in ("arc_easy", "piqa", "sciq", "hellaswag")
        for number in range(3)
        for answer in (" this", " that one")
    ]
    questions = tmp_path / "questions.gz"
    questions.write_bytes(gzip.compress("\n".join(lines).encode()))
    monkeypatch.setattr(KnownText, "fetch", lambda self, progress: questions)
    model, out = small(tmp_path), tmp_path / "out"
    words = ["quantize", str(model), "--method", "rtn", "--bits", "4", "--group-size", "32"]
    words += ["--text", str(held_out), "--tokens", "64"]
    words += ["--window", "64", "--device", "cpu", "--json", "--out", str(out), "--tasks"]
    assert main([*words, "arc-hard"]) == 2
    assert "want some of arc-easy,piqa" in capsys.readouterr().err and not out.exists()
    assert main([*words, "all", "--items", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)["judged"]["rows"]
    assert [row["name"] for row in rows][:2] == ["original", "out"]
    for row in rows:
        assert list(row["tasks"]) == ["arc-easy", "piqa", "sciq", "hellaswag"]
        assert row["tasks"]["piqa"]["items"] == 2 and row["tasks"]["piqa"]["accuracy"]["error"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_kill_while_judging(
    verb: str, tmp_path: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Red when the same command does not go on with the report alone, or takes a folder of other
    options for its own."""
    model, out = small(tmp_path), tmp_path / "out"
    words = words_of(verb, model, out, held_out)

    def die(self: Beside, work: Any, say: Any) -> Any:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(Beside, "judge", die)
        with pytest.raises(Died):
            main(words)
    weights = {p: p.stat().st_mtime_ns for p in out.iterdir()}
    changes = {"prune": ["--keep", "none"], "quantize": ["--type", "Q8_0"]}
    other = [*words, *changes.get(verb, []), *(["--mlp", "64"] if verb == "shrink" else [])]
    if verb == "compress":
        other[other.index(str(model.parent / "recipe.toml"))] = str(tmp_path / "other.toml")
        (tmp_path / "other.toml").write_text(RECIPE.replace("wanda", "sparsegpt"))
    assert main([*words, "--no-report"]) == 2
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(Beside, "judge", canned)
        assert main(other) == 2
        assert "is not empty" in capsys.readouterr().err
        assert main(words) == 0
        assert f"of {model}" in (said := capsys.readouterr().err) and "written already" in said
        assert {p: p.stat().st_mtime_ns for p in weights} == weights
        assert main(words) == 2  # and it is judged
    assert (out / "report.json").exists()


def test_a_kill_between_steps_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a chain that died while it tidied up cannot be gone on with."""
    model, out = small(tmp_path), tmp_path / "out"
    words = words_of("compress", model, out, tmp_path)
    words = [word for word in words if word != "--text" and word != str(tmp_path)]

    def half(folder: Path) -> None:
        (folder / "plan.json").unlink()
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(chain.shutil, "rmtree", half)
        with pytest.raises(Died):
            main([*words, "--no-report"])
    assert main([*words, "--no-report"]) == 0
    assert not (tmp_path / "out.steps").exists()
    report = json.loads((out / "compress.json").read_text())
    assert report["method"] == "rtn" and report["steps_before"][0]["method"] == "wanda"
    assert report["calibration"] == report["steps_before"][0]["calibration"]


def test_a_disk_that_is_full(
    tmp_path: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Red when numbers that were paid for are not shown, a torn report is left, or a disk's
    refusal is a trace."""
    model, out = small(tmp_path), tmp_path / "out"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fills(self: Beside, work: Any, say: Any) -> dict[str, Any]:
        (out / "report.png").mkdir()  # a picture cannot be put there
        patch.setattr(os, "fsync", full)
        return canned(self, work, say)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert main(words_of("compress", model, out, held_out)) == 1
        assert re.search("cannot write .*plan.json: No space left", capsys.readouterr().err)
    words = words_of("prune", model, out, held_out)
    with monkeypatch.context() as patch:
        patch.setattr(Beside, "judge", fills)
        assert main(words) == 1
    said = capsys.readouterr()
    assert "| out" in said.out and f"of {model}" in said.err
    assert re.search("note: no report.png: cannot write .*nothing but the picture", said.err)
    assert re.search("error: cannot write .*report.json: No space left.*goes on", said.err)
    assert not list(out.glob("report.json*"))
    monkeypatch.setattr(Beside, "judge", canned)
    assert main(words) == 0 and (out / "report.json").exists()
