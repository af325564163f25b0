"""What goes wrong at start-up is named: the architecture, the tensor, the shape, the bytes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config import EngineArgs
from quire.engine.build import build_engine
from quire.errors import CheckpointError, EngineDead, NotSupported, OutOfMemory
from quire.models.registry import FAMILIES
from tests.hf import StateDictCheckpoint, tiny_model

SMALL = {"device": "cpu", "max_model_len": 64, "kv_cache_memory": 1 << 20}


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_the_folder_loads_before_it_is_damaged(folder: Path) -> None:
    """Without this, the tests below could pass for the wrong reason."""
    assert LLM(str(folder), **SMALL).get_tokenizer().vocab_size > 300


def test_unknown_architecture_is_named_with_the_known_ones(folder: Path) -> None:
    """Red when an unsupported model fails with a missing tensor or a KeyError."""
    edit_config(folder, architectures=["LLamaForCausalLM"])
    with pytest.raises(NotSupported) as caught:
        LLM(str(folder), **SMALL)
    message = str(caught.value)
    assert "'LLamaForCausalLM'" in message and "did you mean 'LlamaForCausalLM'?" in message
    assert all(name in message for name in FAMILIES.entries)


@pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", [None]])
def test_architectures_of_the_wrong_kind(folder: Path, value: Any) -> None:
    """Red when a malformed config raises TypeError."""
    edit_config(folder, architectures=value)
    with pytest.raises(CheckpointError, match="architectures="):
        LLM(str(folder), **SMALL)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_missing_tensor_is_named(folder: Path, name: str) -> None:
    """Red when a part of a fused weight stays uninitialised, or the file's own name is not told."""
    edit_weights(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=name):
        LLM(str(folder), **SMALL)


def test_wrong_shape_is_named(folder: Path) -> None:
    """Red when a tensor is broadcast or cut to fit."""
    name = "model.layers.0.self_attn.o_proj.weight"
    edit_weights(folder, lambda t: t.update({name: t[name][:, :-1].contiguous()}))
    with pytest.raises(CheckpointError) as caught:
        LLM(str(folder), **SMALL)
    assert name in str(caught.value)
    assert "(48, 47)" in str(caught.value) and "(48, 48)" in str(caught.value)


def test_a_transposed_square_weight_is_not_seen_but_a_transposed_other_is(folder: Path) -> None:
    """Red when the check compares element counts instead of shapes."""
    name = "model.layers.0.mlp.down_proj.weight"
    edit_weights(folder, lambda t: t.update({name: t[name].t().contiguous()}))
    with pytest.raises(CheckpointError, match=name):
        LLM(str(folder), **SMALL)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_is_named(folder: Path, missing: str) -> None:
    """Red when a half-copied folder fails with anything but the name of what is missing."""
    (folder / missing).unlink()
    with pytest.raises(CheckpointError, match=missing.replace("model.safetensors", "safetensors")):
        LLM(str(folder), **SMALL)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 0),
        ("hidden_size", "48"),
        ("num_key_value_heads", 5),
        ("vocab_size", None),
        ("hidden_act", "gelu"),
        ("rope_parameters", {"rope_type": "spiral", "rope_theta": 10000.0}),
    ],
)
def test_bad_config_value_is_named(folder: Path, key: str, value: Any) -> None:
    """Red when a config this engine cannot honour is run anyway."""
    edit_config(folder, **{key: value})
    word = "rope_type" if key == "rope_parameters" else key
    with pytest.raises(CheckpointError, match=word):
        LLM(str(folder), **SMALL)


def test_no_such_path() -> None:
    """Red when a missing folder is looked up on a hub or fails without its name."""
    with pytest.raises(CheckpointError, match=r"\./no/such/model"):
        LLM("./no/such/model")


def test_unknown_argument_gets_a_suggestion(tiny_folder: Path) -> None:
    """Red when a misspelt argument is swallowed."""
    with pytest.raises(NotSupported, match=r"'max_num_seq' \(did you mean 'max_num_seqs'\?\)"):
        LLM(str(tiny_folder), max_num_seq=3)
    LLM(str(tiny_folder), **SMALL, trust_remote_code=True, disable_log_stats=True)


def test_too_little_memory_says_what_would_fit(tiny_folder: Path) -> None:
    """Red when the refusal comes late, or its advice does not work."""
    args = {**SMALL, "max_model_len": 256, "page_size": 4, "max_num_seqs": 2}
    with pytest.raises(OutOfMemory) as caught:
        LLM(str(tiny_folder), **{**args, "kv_cache_memory": 20_000})
    fits = int(re.search(r"largest max_model_len that fits is (\d+)", str(caught.value))[1])
    LLM(str(tiny_folder), **{**args, "kv_cache_memory": 20_000, "max_model_len": fits})
    with pytest.raises(OutOfMemory, match="not even one page"):
        LLM(str(tiny_folder), **{**args, "kv_cache_memory": 100})


def test_unknown_attention_backend(tiny_folder: Path) -> None:
    """Red when the message does not list what there is."""
    with pytest.raises(NotSupported, match="reference"):
        LLM(str(tiny_folder), **SMALL, attention_backend="flash")


def test_decisions_tell_what_was_chosen(tiny_folder: Path) -> None:
    """Red when a choice is made without being recorded."""
    llm = LLM(str(tiny_folder), **SMALL)
    made = {d.what: d.value for d in llm.decisions}
    assert made["device"] == "cpu" and made["attention"] == "cpu"
    assert made["max_model_len"] == "64" and "pages of 16" in made["kv cache"]
    assert all(d.why for d in llm.decisions)


def test_dummy_weights_need_no_tensors(tiny_folder: Path, folder: Path) -> None:
    """Red when load_format='dummy' opens the weights."""
    (folder / "model.safetensors").unlink()
    llm = LLM(str(folder), **SMALL, load_format="dummy")
    (output,) = llm.generate("the fox", use_tqdm=False)
    assert output.outputs[0].token_ids


def test_extra_tensors_are_left_alone() -> None:
    """Red when a checkpoint with another task's head is refused."""
    checkpoint = StateDictCheckpoint(tiny_model("llama-gqa"))
    checkpoint.tensors["score.weight"] = torch.zeros(3)
    args = EngineArgs(device="cpu", max_model_len=32, kv_cache_memory=1 << 20)
    assert build_engine(args, checkpoint).spec.num_layers == 3


GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def answers(llm: LLM, prompts: list[Any]) -> list[Any]:
    return [output.outputs[0] for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def assert_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_live) == (0, 0, 0)


def test_a_step_that_fails_costs_nobody_a_token(make_llm: Callable[..., LLM]) -> None:
    """Red when one lost step raises out of generate and takes every answer along."""
    llm = make_llm()
    want = [answer.token_ids for answer in answers(llm, ["the fox", "the dog"] * 8)]
    engine = llm._engine
    plain, calls = engine.runner.sampler, []

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("a kernel failed")
        return plain(*args)

    engine.runner.sampler = failing
    assert [a.token_ids for a in answers(llm, ["the fox", "the dog"] * 8)] == want
    assert_idle(llm)


def test_a_fault_ends_only_its_own_request(make_llm: Callable[..., LLM]) -> None:
    """Red when the culprit's neighbours end with it, or nobody is told what went wrong."""
    llm = make_llm()
    prompts = ["the fox", "the dog", "def main():", [77, 78, 79], "over"]
    want = [answer.token_ids for answer in answers(llm, prompts)]
    runner = llm._engine.core.runner
    execute, poisoned = runner.execute, set()

    def failing(plan: Any) -> Any:
        poisoned.update(a.row for a in plan.admissions if list(a.tokens[:3]) == [77, 78, 79])
        if poisoned & {work.row for work in plan.works}:
            poisoned.clear()
            raise RuntimeError("token 77 makes this kernel fail")
        return execute(plan)

    runner.execute = failing
    found = answers(llm, prompts)
    assert [a.finish_reason for a in found] == ["length"] * 3 + ["error", "length"]
    assert "token 77 makes this kernel fail" in found[3].stop_reason
    assert [a.token_ids for i, a in enumerate(found) if i != 3] == want[:3] + want[4:]
    with pytest.raises(EngineDead, match=r"3 tokens ended without its numbers.*token 77"):
        llm.embed(prompts, use_tqdm=False)
    assert_idle(llm)


def test_a_lost_device_leaves_no_request_behind(make_llm: Callable[..., LLM]) -> None:
    """Red when an error nothing can contain leaves pages, rows or waiting requests."""
    llm = make_llm()
    plain = llm._engine.runner.sampler

    def failing(*args: Any) -> Any:
        raise RuntimeError("CUDA error: device lost")

    llm._engine.runner.sampler = failing
    with pytest.raises(RuntimeError, match="device lost"):
        answers(llm, ["the fox", "the dog"] * 8)
    llm._engine.runner.sampler = plain
    assert_idle(llm)
    assert all(answer.token_ids for answer in answers(llm, ["the fox"] * 2))
