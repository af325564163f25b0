"""Weights rounded at load and kept in 16 bits: what the engine says and what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.engine.cpu_path import CpuPath
from quire.errors import NotSupported
from quire.load.grouped import Grouped, consecutive
from quire.models.tiny import tiny_model
from quire.native.library import find_library
from quire.ops.native_ops import NativeOps
from quire.quant.load_forms import load_form

SMALL = {"device": "cpu", "num_threads": 1, "max_model_len": 64, "kv_cache_memory": 1 << 22}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=3)
NAME = "rtn-int8-g32"
PROMPTS = [[5, 6, 7, 8, 9], [1, 2], list(range(20, 50))]


def completions(folder: Path, **more: object) -> list[Any]:
    llm = LLM(str(folder), skip_tokenizer_init=True, **{**SMALL, **more})  # type: ignore[arg-type]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [out.outputs[0] for out in llm.generate(prompts, GREEDY)]


def answers(folder: Path, **more: object) -> list[list[int]]:
    return [list(made.token_ids) for made in completions(folder, **more)]


@pytest.mark.parametrize(
    "family, name",
    [
        *(("qwen3", NAME), ("qwen3_moe", NAME), ("deepseek_v3", NAME)),
        *(("qwen3", "fp8"), ("qwen3", "int8"), ("qwen3", "nf4"), ("qwen3", "mxfp4")),
        *(("qwen3_moe", "fp8"), ("qwen3_moe", "mxfp4"), ("deepseek_v3", "nf4")),
    ],
)
def test_rounded_weights_are_those_of_the_name(family: str, name: str, tmp_path: Path) -> None:
    """Red when other weights are multiplied with than the form makes: a plain checkpoint of those
    gives the same logprobs in the reference mode, up to the rounding of activations."""
    tiny_model(family, tmp_path / "plain", seed=3, tokenizer=False, hidden_size=64)
    form = load_form(name)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    for key, tensor in tensors.items():
        if tensor.ndim == 2 and not key.endswith("mlp.gate.weight"):
            is_head = key.endswith(("embed_tokens.weight", "lm_head.weight"))
            made = (form.for_heads() if is_head else form).of(tensor)
            tensors[key] = tensor if made is None else made.dequantize()
    (tmp_path / "rounded").mkdir()
    config = (tmp_path / "plain" / "config.json").read_text()
    (tmp_path / "rounded" / "config.json").write_text(config)
    save_file(tensors, tmp_path / "rounded" / "model.safetensors", metadata={"format": "pt"})
    wanted = completions(tmp_path / "rounded", dtype="float32")
    for got, want in zip(completions(tmp_path / "plain", quantization=name), wanted, strict=True):
        theirs = {token: value.logprob for token, value in got.logprobs[0].items()}
        ours = {token: value.logprob for token, value in want.logprobs[0].items()}
        both = theirs.keys() & ours.keys()
        assert both and all(abs(theirs[token] - ours[token]) < 0.1 for token in both)


def test_sixteen_bits_stay_and_change_nothing(tmp_path: Path) -> None:
    """Red when a bf16 checkpoint is expanded, or multiplied in bf16."""
    folder = tiny_model("llama", tmp_path, seed=1, tokenizer=False)
    tensors = {k: v.bfloat16() for k, v in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert answers(folder) == answers(folder, dtype="float32")
    llm = LLM(str(folder), skip_tokenizer_init=True, **SMALL)  # type: ignore[arg-type]
    said = {d.what: d.value for d in llm.decisions}
    if "weights" in said:  # there is a native library
        assert said["weights"].startswith("bfloat16 ")


def test_a_word_that_means_nothing(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path, tokenizer=False)
    with pytest.raises(NotSupported, match=r"got quantization='int3', want fp8, int8, nf4"):
        answers(folder, quantization="int3")


def test_a_word_for_what_is_stored(tmp_path: Path) -> None:
    """Red when vLLM's word for a form is taken for files that are of another."""
    folder = tiny_model("llama", tmp_path, seed=2, tokenizer=False)
    with pytest.raises(NotSupported, match="got quantization='awq_marlin', the weights are stored"):
        answers(folder, quantization="awq_marlin")


def test_a_form_for_weights_on_a_gpu() -> None:
    """Red when a word for a form is refused, or rounds what is stored in that form."""
    from quire.config import EngineArgs
    from quire.engine.build import asked_form
    from tests.load.held import Held

    for name in ("fp8", "int8", "nf4", "mxfp4", "rtn-int4-g128"):
        args, cuda = EngineArgs(model="x", quantization=name), torch.device("cuda")
        for device in (cuda, torch.device("cpu")):
            assert asked_form(args, Held({}, {}), device) is not None
    stored = Held({"quantization_config": {"quant_method": "fp8"}}, {})
    assert (
        asked_form(EngineArgs(model="x", quantization="fp8"), stored, torch.device("cuda")) is None
    )


def test_torch_serves_rounded_weights_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a machine without a compiler refuses what others load."""
    from quire.native.library import Found

    folder = tiny_model("llama", tmp_path, seed=2, tokenizer=False)
    monkeypatch.setattr("quire.engine.cpu_path.find_library", lambda: Found(None, "none here"))
    assert torch.tensor(answers(folder, quantization="rtn-int4-g32-asym")).shape == (3, 8)


def test_what_no_kernel_takes_is_said() -> None:
    """Red when weights take eight times the bytes of their file and the engine says nothing."""
    library, why = find_library()
    if library is None:
        pytest.skip(f"no native library: {why}")
    codes = torch.randint(0, 16, (32, 64), dtype=torch.uint8)
    found = {}
    for size in (8, 32):  # inputs that share a scale
        groups = consecutive(64, size, codes.device)
        weight = Grouped(codes, 4, torch.rand(32, 64 // size), 8, groups).weight()
        ops, path = NativeOps(library), CpuPath(library, why, True, "as the file holds them")
        ops.linear([weight], None)
        found[size] = {d.what: d.value for d in path.of_packed_files().decisions(ops)}
        assert "expanded weights" not in {d.what for d in path.decisions(ops)}
    assert found[8]["expanded weights"] == "float32 8.00 KiB"
    assert "expanded weights" not in found[32]
