"""What cannot be trained is named, with the reason and a way out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.cli import main as cli
from quire.compress.beside import Beside
from quire.distill import loop, plot
from quire.distill.losses import Judged
from quire.distill.pupils.early_exit import EarlyExit
from quire.distill.recipe import Shape
from quire.errors import BadRequest, NotSupported, QuireError
from quire.evaluate.texts import HeldOut
from quire.models.tiny import tiny_model
from tests.compress.models import canned
from tests.distill.case import SHAPES, job, run, silent, target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target(tmp_path_factory.mktemp("distill"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--kind", "early-exit"], "did you mean 'early_exit'?"),
        (["--kind", "eagle3", "--prompts", "/nowhere"], "cannot read /nowhere"),
        (["--kind", "eagle3", "--prompts", "EMPTY"], "has no prompts: want one a line"),
        (["--kind", "eagle3", "--prompts", "BYTES"], "is not UTF-8 text"),
        (["--kind", "eagle3", "--learning-rate", "7"], "want one from 0 to 1"),
        (["--kind", "eagle3", "--temperatures", "0,hot"], "want numbers between commas"),
        (["--kind", "eagle3", "--answers", "1"], "want at least 2"),
        (["--kind", "eagle3", "--own-share", "2"], "want a share from 0 to 1"),
        (["--kind", "eagle3", "--plot", "/proc/loss.png"], "cannot write a picture to /proc"),
        (["--kind", "student", "--tasks", "arc"], "got task 'arc'"),
    ],
)
def test_bad_words(
    words: list[str], told: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a mistake is found after the target has answered, or ends in a trace."""
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    files = {"EMPTY": str(tmp_path / "empty.txt"), "BYTES": str(tmp_path / "bytes.txt")}
    words = [files.get(word, word) for word in words]
    assert cli.main(["distill", str(model), "--out", str(tmp_path / "out"), *words]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("shape", "changes", "told"),
    [
        (Shape("student"), {}, "add --from MODEL"),
        (Shape("early_exit", layers=3), {}, "use 2 or less"),
        (Shape("draft_model", layers=4), {}, "want from 1 to as many"),
        (Shape("draft_model", hidden=13), {}, "want a multiple of the target's heads"),
        (Shape("eagle3", vocab=9999), {}, "got --vocab 9999 of the target's"),
        (Shape("medusa", vocab=9999), {}, "got --vocab 9999 of the target's"),
        (SHAPES["eagle3"], {"own_share": 0.5}, "cannot write by itself"),
    ],
)
def test_shapes_that_do_not_fit(
    shape: Shape, changes: dict[str, float], told: str, model: Path, tmp_path: Path
) -> None:
    """Red when a pupil that the target cannot have is begun."""
    with pytest.raises((BadRequest, NotSupported), match=told):
        run(model, tmp_path / "out", shape, answers=2, **changes)


def test_vocabularies_that_differ(model: Path, tmp_path: Path) -> None:
    """Red when a student learns a distribution over other tokens than its own."""
    other = tiny_model("llama", tmp_path / "wide", vocab_size=300)
    with pytest.raises(NotSupported, match="with 300 tokens for a target with"):
        run(model, tmp_path / "one", Shape("student", start=str(other)), answers=2)
    same = tiny_model("llama", tmp_path / "moved")
    file = same / "tokenizer.json"
    said = json.loads(file.read_text())
    vocab = said["model"]["vocab"]
    said["model"]["vocab"] = {
        token: (id if id < 2 else 2 + (id - 1) % (len(vocab) - 2)) for token, id in vocab.items()
    }
    file.write_text(json.dumps(said))
    with pytest.raises(NotSupported, match="pupils need the target's own tokenizer"):
        run(model, tmp_path / "two", Shape("student", start=str(same)), answers=2)


def test_hidden_states_of_another_width(model: Path, tmp_path: Path) -> None:
    """Red when states that cannot be compared are."""
    narrow = tiny_model("llama", tmp_path / "narrow", hidden_size=16, head_dim=8)
    with pytest.raises(NotSupported, match="only states of one width can be compared"):
        shape = Shape("student", start=str(narrow))
        run(model, tmp_path / "out", shape, answers=2, hidden_loss=0.1)


def test_a_loss_that_is_no_number(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when weights are spoiled by a loss that is no number, or the good ones are lost."""
    shape, real, calls = SHAPES["early_exit"], EarlyExit.judge, iter(range(100))

    def judge(self: EarlyExit, lesson: object) -> Judged:
        judged = real(self, lesson)  # type: ignore[arg-type]
        if torch.is_grad_enabled() and next(calls) == 3:
            return Judged(judged.loss * float("nan"), judged.survived, judged.num_rows)
        return judged

    with monkeypatch.context() as patch:
        patch.setattr(EarlyExit, "judge", judge)
        with pytest.raises(QuireError, match=r"loss is nan in step 4; the state of step 2 is kept"):
            run(model, tmp_path / "out", shape)
    assert run(model, tmp_path / "out", shape)["resumed_at"] == 2


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when the command does not write its report, its plot or where the result is."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('hello\n"two\\nlines"\n')
    out, picture = tmp_path / "out", tmp_path / "loss.png"
    words = ["distill", str(model), "--kind", "early_exit", "--layers", "1", "--out", str(out)]
    words += ["--answers", "4", "--tokens", "8", "--steps", "2", "--batch", "2", "--device", "cpu"]
    words += ["--prompts", str(prompts), "--plot", str(picture), "--accumulate", "2"]
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == str(out)
    assert "before: held out: loss" in shown.err and "2/2 steps: loss" in shown.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads((out / loop.REPORT).read_text())
    assert report["trained_values"] > 0 and report["schedule"]["accumulate"] == 2


def test_a_student_is_judged(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a student is not set beside its target, a drafter is, or a picture that cannot be
    drawn costs a run."""
    out, start = tmp_path / "out", tiny_model("llama", tmp_path / "start", num_hidden_layers=1)
    words = ["distill", str(model), "--kind", "student", "--from", str(start), "--out", str(out)]
    words += ["--answers", "4", "--tokens", "8", "--steps", "2", "--batch", "2", "--device", "cpu"]
    words += ["--plot", str(tmp_path / "loss.png"), "--json"]

    def fail(figure: object, path: Path) -> None:
        raise QuireError("no room for it")

    monkeypatch.setattr(Beside, "judge", canned)
    monkeypatch.setattr(HeldOut, "known", lambda progress: None)
    monkeypatch.setattr(plot, "save_picture", fail)
    assert cli.main(words) == 0
    said = capsys.readouterr()
    assert "note: no room for it" in said.err
    assert json.loads(said.out)["judged"]["meaning"] == [f"of {model}"]
    assert (out / "report.json").exists() and (out / "report.png").exists()
    (out / "report.json").unlink()
    words[words.index("student")] = "draft_model"
    words[words.index(str(out))] = str(tmp_path / "draft")
    assert cli.main(words) == 0 and not (tmp_path / "draft" / "report.json").exists()


def test_progress_is_told(model: Path, tmp_path: Path) -> None:
    """Red when a run is silent, or tells other figures than its report has."""
    told, drawn = list[loop.Progress](), list[int]()
    asked = job(model, tmp_path / "out", SHAPES["medusa"])
    asked = replace(asked, draw=lambda report: drawn.append(len(report["history"])))
    report = loop.distil(asked, told.append)
    assert drawn == [2, 4, 6]  # while it goes on, at every checkpoint
    steps = [made for made in told if made.what == "steps"]
    assert [made.loss for made in steps] == [entry["loss"] for entry in report["history"]]
    assert [made.done for made in steps if made.held_out is not None] == [2, 4, 6]
    assert silent(steps[0]) is None
