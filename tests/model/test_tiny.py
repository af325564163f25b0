"""The tiny factory: one member of every family, which transformers reads as its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.config import EngineArgs
from quire.engine.build import Engine, build_engine
from quire.errors import CheckpointError, NotSupported
from quire.load.safetensors_checkpoint import SafetensorsCheckpoint
from quire.models import tiny
from quire.models.registry import FAMILIES, spec_of
from quire.models.tiny import random_tensors, tiny_model
from quire.models.tiny_configs import tiny_config, tiny_families
from tests.model.records import records

TOLERANCE = 1e-4
# Longer than the tiny windows.
PROMPT = [0, *(3 + i * i % 251 for i in range(37))]


def engine_of(folder: Path, **changes: Any) -> Engine:
    args = EngineArgs(
        **{
            "device": "cpu",
            "dtype": "float32",
            "page_size": 4,
            "kv_cache_memory": 1 << 22,
            "max_model_len": 128,
            **changes,
        }
    )
    return build_engine(args, SafetensorsCheckpoint.open(folder))


def is_eye(name: str) -> bool:
    """Parts that look at images are no part of a text model."""
    return "vision" in name or "multi_modal" in name


def test_every_family_has_a_member() -> None:
    """Red when a family arrives in the registry without a line in MEMBERS."""
    assert tiny_families() == tuple(FAMILIES.entries)


@pytest.mark.parametrize("family", FAMILIES.entries)
def test_transformers_reads_what_was_written(family: str, tmp_path: Path) -> None:
    """Red when a tensor's name or shape is not its family's own, or the two compute otherwise."""
    folder = tiny_model(family, tmp_path, seed=3)
    model, told = getattr(transformers, family).from_pretrained(folder, output_loading_info=True)
    missing = [name for name in told["missing_keys"] if not is_eye(name)]
    assert not missing and not told["unexpected_keys"] and not told["mismatched_keys"], told
    with torch.no_grad():
        want = model.eval()(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    ((record, *_),) = records(engine_of(folder, max_num_batched_tokens=16), [PROMPT])
    got = torch.tensor(record.top_logprobs)
    assert (got - want[torch.tensor(record.top_tokens)]).abs().max() < TOLERANCE


def test_names_and_changes() -> None:
    """Red when a model_type is not understood, or a change does not get into the config."""
    config = tiny_config("qwen3_moe", num_experts=4, num_hidden_layers=1)
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert spec_of(config).moe.router.num_experts == 4
    assert tiny_config("GPT2LMHeadModel") == tiny_config("gpt2")
    with pytest.raises(NotSupported, match=r"no tiny member of 'bert'; add a line to MEMBERS"):
        tiny_config("bert")


def test_seeds_differ_and_repeat() -> None:
    config = tiny_config("llama")
    first, again, other = (random_tensors(config, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_a_gap_in_a_name_table_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a parameter nobody stores would be left out in silence."""
    config = tiny_config("llama")
    table = tiny.names_of(config, spec_of(config))
    del table["model.layers.1.self_attn.k_proj.weight"]
    monkeypatch.setattr(tiny, "names_of", lambda *_: table)
    with pytest.raises(CheckpointError, match=r"no line for layers.1.qkv.weight:k"):
        random_tensors(config)


def test_its_tokenizer_reads_any_text(tmp_path: Path) -> None:
    """Red when Quire and transformers read the folder's tokenizer differently."""
    from quire.text.tokenizer import Tokenizer

    folder = tiny_model("llama", tmp_path)
    ours, theirs = Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    text = "naïve café <s>"
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert max(ours.encode("ÿ" + text)) < tiny_config("llama")["vocab_size"]
    assert ours.decode(ours.encode("naïve")) == "naïve"
