"""Pruning against the papers' formulas in fp64, and what is written when it is done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.compress.hessian import DAMP
from quire.compress.methods import PRUNERS, pass_of
from quire.compress.passes.recipe import Recipe
from quire.compress.passes.sparsegpt import BLOCK
from quire.compress.reconstruct import fitted
from quire.compress.seen import Needs, Seen
from quire.config import EngineArgs
from quire.errors import BadRequest, NotSupported
from quire.evaluate.footprint import resident_bytes
from quire.load.open import open_model
from quire.load.unpack import readable
from quire.models.tiny import tiny_model
from quire.models.tiny_configs import tiny_families
from tests.compress.models import CPU, hidden, job, run, small

OUT, IN = 24, 192  # more inputs than SparseGPT takes at once
REFUSED = {"GPT2LMHeadModel", "GptOssForCausalLM", "BitNetForCausalLM"}  # see `Source.check_layout`


def inputs() -> Tensor:
    """[rows, in] that have much in common, some of them large."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(IN, IN, generator=generator) + 2 * torch.randn(1, IN, generator=generator)
    return torch.randn(1024, IN, generator=generator) @ mixing * torch.linspace(0.2, 2.0, IN)


def weights() -> Tensor:
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(1))


def cut(method: str, pattern: str | None) -> Tensor:
    work: Any = pass_of(method)(Recipe(method, pattern=pattern), torch.float32)
    seen = Seen(IN, Needs(gram=True), 8, CPU)
    seen.add(inputs())
    made: Tensor = work.cut(weights(), seen, "w")
    return made


def smallest(scores: Tensor, size: int) -> Tensor:
    """True at the lower half of every `size` numbers."""
    split = scores.reshape(-1, size)
    ranks = split.argsort(1).argsort(1)
    return (ranks < size // 2).view_as(scores)


def by_sparsegpt(weight: Tensor, gram: Tensor, run: int | None) -> Tensor:
    """What goes: an input is cut, the others move by the inverse of what is left of the Hessian,
    and the input is struck out. Scores are w squared over that inverse's diagonal."""
    hessian = gram + DAMP * gram.diagonal().mean() * torch.eye(IN, dtype=torch.float64)
    left, size = weight.clone(), run or BLOCK
    inverses = [torch.linalg.inv(hessian[j:, j:]) for j in range(IN)]
    diagonal = torch.stack([inverse[0, 0] for inverse in inverses])
    goes = torch.zeros_like(weight, dtype=torch.bool)
    for j in range(IN):
        if j % size == 0:
            some = slice(j, min(j + size, IN))
            scores = left[:, some].square() / diagonal[some]
            goes[:, some] = smallest(scores, run or scores.numel())
        error = torch.where(goes[:, j], left[:, j], 0.0) / diagonal[j]
        left[:, j:] -= error[:, None] * inverses[j][0]
    return goes


@pytest.mark.parametrize("pattern", [None, "2:4"])
@pytest.mark.parametrize("method", PRUNERS.entries)
def test_masks_are_those_of_the_papers(method: str, pattern: str | None) -> None:
    """Red when a score, what it is compared with, or the order of cutting is another."""
    weight, x = weights().double(), inputs().double()
    run = 4 if pattern else None
    if method == "magnitude":
        want = smallest(weight.abs(), run or weight.numel())
    elif method == "wanda":
        want = smallest(weight.abs() * x.norm(dim=0), run or IN)
    else:
        want = by_sparsegpt(weight, x.t() @ x, run)
    got = cut(method, pattern) == 0
    assert got.sum() == want.sum() == OUT * IN // 2
    assert (got == want).double().mean() >= 0.99


def test_sparsegpt_moves_outputs_least() -> None:
    """Red when kept weights no longer make up for those that went, or scores ignore the inputs."""
    x, weight = inputs(), weights()

    def cost(method: str) -> float:
        return (x @ (cut(method, "2:4") - weight).t()).square().sum().item()

    assert cost("sparsegpt") < 0.5 * cost("wanda") < 0.5 * cost("magnitude")


def test_fitting_is_least_squares() -> None:
    """Red when gradients stop too early, a zero comes back, or rows pull at each other."""
    x, weight = inputs().double()[:, :64], weights().double()[:, :64]
    start = weight.masked_fill(smallest(weight.abs(), 4), 0.0)
    other = x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).double()
    gram, cross = other.t() @ other, x.t() @ other
    damp = DAMP * gram.diagonal().mean()
    made = fitted(start.float(), (weight @ cross).float(), gram.float()).double()
    assert torch.equal(made == 0, start == 0)
    for row, (found, begun) in enumerate(zip(made, start, strict=True)):
        at = begun.nonzero().flatten()
        matrix = gram[at][:, at] + damp * torch.eye(len(at), dtype=torch.float64)
        moved = torch.linalg.solve(matrix, ((weight @ cross)[row] - begun @ gram)[at])
        assert torch.allclose(found[at], begun[at] + moved, rtol=2e-2, atol=2e-3), row


@pytest.mark.parametrize("method", PRUNERS.entries)
def test_reconstruction_brings_outputs_back(method: str, tmp_path: Path) -> None:
    """Red when blocks are fitted to something else than the dense model's outputs."""
    model = small(tmp_path)
    text = job(model, tmp_path, method).calibration
    want, errors = hidden(model, text=text), []
    for reconstruct in (False, True):
        out = tmp_path / f"out-{reconstruct}"
        report: Any = run(model, out, method, pattern="2:4", reconstruct=reconstruct)
        assert report["zeros"] == 0.5
        stored = readable(open_model(EngineArgs(model=str(out))).checkpoint, CPU)
        moved = hidden(model, stored, text) - want
        errors.append((moved.square().sum() / want.square().sum()).item())
        split = stored.read("model.layers.1.mlp.down_proj.weight").view(-1, 4)
        assert bool(((split == 0).sum(1) == 2).all())
    assert errors[1] < 0.7 * errors[0], errors


@pytest.mark.parametrize("family", tiny_families())
def test_every_family(family: str, tmp_path: Path) -> None:
    """Red when a family's names, fused weights or experts are pruned so that nobody reads them."""
    model = tiny_model(family, tmp_path / "model")
    if family in REFUSED:
        with pytest.raises(NotSupported):
            run(model, tmp_path / "out", "wanda")
        return
    report: Any = run(model, tmp_path / "out", "wanda", sparsity=0.25)
    assert 0.2 < report["zeros"] <= 0.25
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    before = hidden(model)
    after = hidden(model, open_model(EngineArgs(model=str(tmp_path / "out"))).checkpoint)
    assert ((after - before).square().sum() / before.square().sum()).item() < 0.4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pattern": "4:2"}, "want N:M with 0 < N < M"),
        ({"pattern": "2-4"}, "want N:M with 0 < N < M"),
        ({"sparsity": 1.5}, "above 0 and below 1"),
        ({"sparsity": 0.3, "pattern": "2:4"}, "leave one out"),
        ({"bits": 4}, "has no use for --bits"),
        ({"pattern": "2:5"}, r"has 96 inputs, no multiple of 5.*--keep"),
    ],
)
def test_what_cannot_be(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Red when a pattern that does not fit is found out after something was written."""
    model = small(tmp_path)
    with pytest.raises((BadRequest, NotSupported), match=message):
        run(model, tmp_path / "out", "wanda", **fields)
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    """Red when options do not reach the pass, or a wrong one ends in a trace."""
    model = small(tmp_path)
    text = str(job(model, tmp_path, "wanda").calibration.file)
    words = ["prune", str(model), "--method", "wanda", "--samples", "4", "--length", "32"]
    words += ["--calibration", text, "--no-report"]
    done = [*words, "--out", str(tmp_path / "out"), "--sparsity", "0.75", "--json"]
    assert main(done) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["zeros"] == 0.75 and report["reconstruct"] is True
    assert main([*words, "--out", str(tmp_path / "other"), "--sparsity", "2"]) == 2
    assert "want a share above 0" in capsys.readouterr().err
    words[3] = "wnada"
    assert main([*words, "--out", str(tmp_path / "other")]) == 2
    assert "did you mean 'wanda'?" in capsys.readouterr().err


def test_two_of_four_are_kept_packed(tmp_path: Path) -> None:
    """Red when a 2:4 model is stored or held with its zeros, or says something else than the same
    weights stored plainly."""
    model = small(tmp_path, dtype="bfloat16")
    said, sizes = [], []
    for plain in (True, False):
        out = tmp_path / f"out-{plain}"
        report: Any = run(model, out, "wanda", pattern="2:4", plain=plain)
        llm = LLM(model=str(out), device="cpu", kv_cache_memory=1 << 22)
        asked = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, ignore_eos=True)
        said.append(llm.generate("abc", asked)[0].outputs[0])
        sizes.append((report["bytes"], resident_bytes(llm._engine.runner.model.blocks)))
    assert said[0].token_ids == said[1].token_ids
    assert said[0].logprobs == said[1].logprobs
    assert sizes[1][0] < sizes[0][0]
    assert sizes[1][1] < 0.65 * sizes[0][1]  # 9/16, and the norms
