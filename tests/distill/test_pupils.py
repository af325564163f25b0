"""Every kind of pupil learns, and is written as what others read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from quire.distill.recipe import Shape
from quire.models.tiny import tiny_model
from tests.distill.case import SHAPES, run, target

ENGINE = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 4, "kv_cache_memory": 1 << 22}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target(tmp_path_factory.mktemp("distill"))


@pytest.mark.parametrize("kind", SHAPES)
def test_the_loss_falls(kind: str, model: Path, tmp_path: Path) -> None:
    """Red when gradients do not reach what is trained, or go the wrong way."""
    report = run(model, tmp_path / "out", SHAPES[kind], steps=30, save_every=30)
    assert report["after"]["loss"] < 0.9 * report["before"]["loss"]
    assert len(report["history"]) == 30
    assert json.loads((tmp_path / "out" / "distill.json").read_text())["after"] == report["after"]
    assert not (tmp_path / "out" / "work" / "states").exists()


@pytest.mark.parametrize(
    "shape",
    [Shape("draft_model", layers=2), Shape("draft_model", layers=1, hidden=16, ffn=24)],
    ids=["copied", "fresh"],
)
def test_a_draft_model_is_an_ordinary_checkpoint(shape: Shape, model: Path, tmp_path: Path) -> None:
    """Red when what is written is not the model that was trained, to us or to transformers."""
    run(model, tmp_path / "out", shape)
    check_against_transformers(tmp_path / "out")


def test_a_student_learns_with_answers_of_its_own(model: Path, tmp_path: Path) -> None:
    """Red when own answers are not used, or the student is written as another model."""
    start = tiny_model("llama", tmp_path / "start", seed=5, num_hidden_layers=1)
    shape = Shape("student", start=str(start))
    report = run(model, tmp_path / "out", shape, steps=12, own_share=0.5, hidden_loss=0.5)
    assert report["after"]["loss"] < report["before"]["loss"]
    own = (tmp_path / "out" / "work" / "own-1.jsonl").read_text().splitlines()
    theirs = (tmp_path / "out" / "work" / "answers.jsonl").read_text().splitlines()
    assert len(own) == 4 and not set(own) & set(theirs)
    assert {json.loads(line)[0][0] for line in own} == {json.loads(theirs[0])[0][0]}
    check_against_transformers(tmp_path / "out")


def check_against_transformers(folder: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = [0, 40, 41, 42, 43]
    with torch.no_grad():
        logits = theirs(torch.tensor([prompt])).logits[0, -1]
    wanted = logits.log_softmax(-1)
    llm = LLM(str(folder), dtype="float32", **ENGINE)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    found = output.outputs[0].logprobs
    assert found is not None
    for id, said in found[0].items():
        assert abs(said.logprob - float(wanted[id])) < 1e-4


def test_a_perfect_pupil_is_seen_as_one(model: Path, tmp_path: Path) -> None:
    """Red when accepted drafts are counted at other positions than the teacher's."""
    report = run(model, tmp_path / "out", Shape("student", start=str(model)), learning_rate=1e-9)
    held_out = report["after"]
    assert held_out["loss"] < 1e-3 and held_out["accepted_1"] > 0.95


@pytest.mark.parametrize("kind", ["early_exit", "medusa", "eagle3"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mixtral"])
def test_targets_of_other_families(kind: str, family: str, tmp_path: Path) -> None:
    """Red when a drafter begins far from a target with experts, windows, caps or normed heads, as
    it does where its logits or states are made otherwise than the target's."""
    report = run(target(tmp_path, family), tmp_path / "out", SHAPES[kind], answers=3, steps=2)
    assert report["after"]["loss"] < 1.05 * report["before"]["loss"] < 20


def test_a_shrunk_model_recovers(model: Path, tmp_path: Path) -> None:
    """Red when what `quire shrink` writes cannot be a student, or learning does not win back what
    shrinking lost."""
    from tests.compress.models import run as compress

    shrunk = tmp_path / "shrunk"
    compress(model, shrunk, "shrink", layers=2, keep=())
    shape = Shape("student", start=str(shrunk))
    report = run(model, tmp_path / "out", shape, steps=40, save_every=40)
    assert report["after"]["loss"] < 0.7 * report["before"]["loss"]
    check_against_transformers(tmp_path / "out")
