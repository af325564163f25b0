"""Whole models: every method and family is written, read back by the engine, and close."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.compress.methods import METHODS
from quire.compress.source import Source
from quire.config import EngineArgs
from quire.errors import BadRequest, NotSupported, QuireError
from quire.load.open import open_model
from quire.load.unpack import readable
from quire.models.tiny import tiny_model
from quire.models.tiny_configs import tiny_families
from tests.compress.models import CPU, hidden, run, small

REFUSED = {"GPT2LMHeadModel", "GptOssForCausalLM", "BitNetForCausalLM"}  # see `Source.check_layout`
# Squared error of what the blocks make of a text: random weights are the hardest there are.
CLOSE = {"rtn": 0.2, "gptq": 0.3, "awq": 0.2, "nf4": 0.2, "codebook": 0.2, "mxfp4": 0.3}
CLOSE |= {"nvfp4": 0.2, "smoothquant": 2e-3, "rtn-fp8": 1e-2}
CLOSE |= dict.fromkeys(("fp8", "gptq-fp8"), 3e-2)


def error_of(model: Path, out: Path) -> float:
    written = readable(open_model(EngineArgs(model=str(out))).checkpoint, CPU)
    want, got = hidden(model), hidden(model, written)
    return ((got - want).square().sum() / want.square().sum()).item()


@pytest.mark.parametrize("method", CLOSE)
def test_every_method_is_read_back(method: str, tmp_path: Path) -> None:
    """Red when a method writes what its reader takes for something else, or loses too much."""
    model = small(tmp_path)
    report: Any = run(model, tmp_path / "out", method)
    assert error_of(model, tmp_path / "out") < CLOSE[method]
    assert 0 < report["mean_error"] < CLOSE[method]
    assert len(report["projections"]) == 14 and not list((tmp_path / "out").glob("*.unfinished"))
    assert not (tmp_path / "out" / "compress.journal").exists()


def test_methods_are_all_tried() -> None:
    """Red when a method comes without a bound on what it may lose."""
    assert {*CLOSE, "gguf"} == set(METHODS)


@pytest.mark.parametrize("family", tiny_families())
def test_every_family(family: str, tmp_path: Path) -> None:
    """Red when a family's names, fused weights or experts are written so that nobody reads them."""
    model = tiny_model(family, tmp_path / "model")
    if family in REFUSED:
        with pytest.raises(NotSupported):
            run(model, tmp_path / "out", "fp8", static_inputs=True)
        return
    run(model, tmp_path / "out", "fp8", static_inputs=True)
    # A router of random weights sends some tokens to other experts.
    assert error_of(model, tmp_path / "out") < 5e-2


def test_the_engine_answers_as_before(tmp_path: Path) -> None:
    """Red when the folder lacks what the engine needs beside weights."""
    model = small(tmp_path)
    run(model, tmp_path / "out", "rtn", bits=8)
    asked = SamplingParams(temperature=0.0, max_tokens=6)
    texts = []
    for folder in (model, tmp_path / "out"):
        llm = LLM(model=str(folder), device="cpu", dtype="float32", kv_cache_memory=1 << 22)
        texts.append(llm.generate("abc", asked)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]


def test_kept_projections_stay_as_they_are(tmp_path: Path) -> None:
    """Red when --keep quantises, or readers are not told what is plain."""
    model = small(tmp_path)
    run(model, tmp_path / "out", "rtn", keep=("lm_head", "down_proj", "model.layers.0.*"))
    stored = open_model(EngineArgs(model=str(tmp_path / "out"))).checkpoint
    assert "model.layers.0.self_attn.q_proj.weight" in stored.names()
    assert "model.layers.1.mlp.down_proj.weight" in stored.names()
    assert "model.layers.1.mlp.up_proj.weight_packed" in stored.names()
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.1.mlp.down_proj" in said["ignore"]
    with pytest.raises(BadRequest, match="fits no projection"):
        run(model, tmp_path / "other", "rtn", keep=("dwon_proj",))


def test_the_head_is_quantised_when_asked(tmp_path: Path) -> None:
    """Red when inputs of the head are not those behind the last norm."""
    model = small(tmp_path, tie_word_embeddings=False, vocab_size=288)
    report: Any = run(model, tmp_path / "out", "gptq", keep=())
    assert report["projections"]["lm_head"]["tokens"] == 6 * 32
    assert 0 < report["projections"]["lm_head"]["error"] < 0.02


def test_experts_that_saw_little_are_named(tmp_path: Path) -> None:
    """Red when an expert is quantised on a handful of tokens without a word."""
    model = tiny_model("qwen3_moe", tmp_path / "model")
    report: Any = run(model, tmp_path / "out", "gptq", group=0, bits=8)
    (remark,) = [text for text in report["remarks"] if "fewer than 128 tokens" in text]
    assert ".experts." in remark


def test_what_does_not_fit_is_said_before_anything_is_written(tmp_path: Path) -> None:
    """Red when a width is only found out after an hour."""
    model = small(tmp_path)
    with pytest.raises(NotSupported, match=r"has 96 inputs.*take --group-size 32"):
        run(model, tmp_path / "out", "rtn", group=128)
    with pytest.raises(NotSupported, match="writes 4 bits"):
        run(model, tmp_path / "out", "awq", bits=3)
    assert not (tmp_path / "out").exists()


def test_calibration_that_is_too_short(tmp_path: Path, capsys: Any) -> None:
    """Red when a text shorter than one sequence is padded, repeated or ignored."""
    model, text = small(tmp_path), tmp_path / "text"
    text.write_text("too short")
    words = ["quantize", str(model), "--method", "awq", "--group-size", "32"]
    words += ["--out", str(tmp_path / "out"), "--calibration", str(text), "--length", "64"]
    assert main(words) == 2
    assert "fewer than one sequence of 64" in capsys.readouterr().err


def test_inputs_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    """Red when inputs that overflow end in a Hessian, and in a quantised model."""
    from safetensors.torch import load_file, save_file

    model = small(tmp_path)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][3] = 3e38
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuireError, match=r"inputs of model\.layers\.1\.self_attn"):
        run(model, tmp_path / "out", "gptq")


def test_the_same_twice(tmp_path: Path) -> None:
    """Red when a set's order, a clock or a random number gets into the files."""
    model = small(tmp_path)
    for name in ("one", "two"):
        run(model, tmp_path / name, "awq")
    for file in sorted((tmp_path / "one").glob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_it_beats_rounding_where_inputs_have_outliers(method: str, tmp_path: Path) -> None:
    """Red when a search or a Hessian no longer earns its time."""
    from safetensors.torch import load_file, save_file

    model = small(tmp_path)
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[::16] *= 8.0  # inputs of every sixteenth channel are large
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    plain: Any = run(model, tmp_path / "rtn", "rtn", asymmetric=True)
    report: Any = run(model, tmp_path / "out", method)
    qkv = [name for name in report["projections"] if name.endswith(("q_proj", "v_proj"))]
    # Rounding is judged on the weights alone; outputs of loud inputs lose as much.
    assert all(
        report["projections"][name]["error"] < plain["projections"][name]["error"] for name in qkv
    )


def test_source_names_experts_one_by_one(tmp_path: Path) -> None:
    """Red when experts in one tensor are written as one, which no layout here knows."""
    from safetensors.torch import load_file, save_file

    model = tiny_model("qwen3_moe", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    stem = "model.layers.0.mlp.experts."
    count = sum(name.startswith(stem) and "gate_proj" in name for name in tensors)
    want = tensors[f"{stem}1.up_proj.weight"].clone()

    def take(name: str) -> torch.Tensor:
        return torch.stack([tensors.pop(f"{stem}{e}.{name}.weight") for e in range(count)])

    both = torch.cat((take("gate_proj"), take("up_proj")), 1)
    tensors |= {f"{stem}gate_up_proj": both, f"{stem}down_proj": take("down_proj")}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    source = Source.open(str(model))
    assert torch.equal(source.read(f"{stem}1.up_proj.weight"), want)
