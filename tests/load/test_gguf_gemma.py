"""Gemma in GGUF files: tiny transformers models written with GGUF's names and its added ones.

The files are made by the gguf package, the numbers by transformers; what is generated from a file
must be what the model it was made of generates, with prompts longer than its windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quire.errors import CheckpointError
from quire.load.gguf_checkpoint import GGUFCheckpoint
from quire.models.registry import spec_of
from tests.hf import GEMMA_SIZES, StateDictCheckpoint
from tests.load.gguf_file import ATTENTION, assert_generates_as, finish, new_writer

gguf = pytest.importorskip("gguf")

SIZES: Mapping[str, Any] = {
    **GEMMA_SIZES,
    "query_pre_attn_scalar": 16,  # no file states it: that of a head's size is assumed
}
LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
CONFIGS: Mapping[str, Any] = {
    "gemma": lambda: transformers.GemmaConfig(**SIZES),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, rope_parameters=LINEAR),
}
MODELS = {"gemma": "Gemma", "gemma2": "Gemma2", "gemma3": "Gemma3"}
INNER = {
    **ATTENTION,
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMS = {
    "gemma": {"post_attention_layernorm": "ffn_norm"},
    "gemma2": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
NORMS["gemma3"] = NORMS["gemma2"]


def model_of(arch: str) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, f"{MODELS[arch]}ForCausalLM")(CONFIGS[arch]()).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Norm weights are few bits, as in a released model: then one can be taken off again.
            if name.endswith("norm.weight"):
                weight.copy_(torch.randn_like(weight).mul(0.3).bfloat16().float())
            else:
                weight.normal_(std=0.15)
    return model


def tensors_of(model: Any, arch: str) -> dict[str, Tensor]:
    outer = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    out = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        if name in outer:
            theirs = outer[name]
        else:
            layer, _, inner = name.removeprefix("model.layers.").partition(".")
            theirs = f"blk.{layer}.{(INNER | NORMS[arch])[inner.removesuffix('.weight')]}.weight"
        out[theirs] = tensor + 1.0 if theirs.endswith("norm.weight") else tensor
    return out


def write(path: Path, model: Any, arch: str, more: Callable[[Any], None] | None = None) -> Path:
    config = model.config
    writer = new_writer(path, config, arch, config.head_dim)
    if arch != "gemma":
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "gemma3":
        writer.add_rope_freq_base(1e6)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    if more is not None:
        more(writer)
    finish(writer, tensors_of(model, arch))
    return path


@pytest.mark.parametrize("arch", MODELS)
def test_a_file_generates_what_its_model_does(tmp_path: Path, arch: str) -> None:
    model = model_of(arch)
    checkpoint = GGUFCheckpoint.open(write(tmp_path / "tiny.gguf", model, arch))
    stored = StateDictCheckpoint(model)
    assert set(checkpoint.names()) == set(stored.names()) - {"lm_head.weight"}
    for name in checkpoint.names():
        assert torch.equal(checkpoint.read(name), stored.read(name)), name
    got, want = spec_of(checkpoint.config), spec_of(stored.config)
    assert got.dtype == "bfloat16"  # Gemma's hidden states outgrow float16
    for field in ("architecture", "windows", "rope", "local_rope", "attn_scale", "attn_softcap"):
        assert getattr(got, field) == getattr(want, field), field
    assert_generates_as(checkpoint, model, count=4)


def test_transformers_takes_the_config(tmp_path: Path) -> None:
    """Red when what no file states is assumed otherwise, or spelled as transformers does not."""
    path = write(tmp_path / "tiny.gguf", model_of("gemma3"), "gemma3")
    config = dict(GGUFCheckpoint.open(path).config)
    theirs = transformers.Gemma3TextConfig(**SIZES)
    assert config["layer_types"] == theirs.layer_types
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 1e4
    ours = transformers.Gemma3TextConfig(**config)
    assert ours.layer_types == theirs.layer_types and ours.sliding_window == 13


@pytest.mark.parametrize(("arch", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_models_scale_by_hidden_size(
    tmp_path: Path, arch: str, num_layers: int
) -> None:
    """Their queries are divided by sqrt(hidden / heads), which no file says."""
    small = {"num_hidden_layers": num_layers, "hidden_size": 96, "intermediate_size": 8}
    config = type(CONFIGS[arch]())(**{**SIZES, **small})
    model = getattr(transformers, f"{MODELS[arch]}ForCausalLM")(config)
    path = write(tmp_path / "tiny.gguf", model, arch)
    assert spec_of(GGUFCheckpoint.open(path).config).attn_scale == (96 // 4) ** -0.5


def test_a_file_may_state_its_pattern(tmp_path: Path) -> None:
    def more(writer: Any) -> None:
        writer.add_sliding_window_pattern(3)
        writer.add_float32("gemma3.rope.freq_base_swa", 5000.0)

    path = write(tmp_path / "tiny.gguf", model_of("gemma3"), "gemma3", more)
    spec = spec_of(GGUFCheckpoint.open(path).config)
    assert spec.windows == (13, 13, None, 13, 13, None, 13)
    assert spec.local_rope is not None and spec.local_rope.theta == 5000.0


@pytest.mark.parametrize("size", [7, 6])
def test_a_file_may_list_its_windows(tmp_path: Path, size: int) -> None:
    def more(writer: Any) -> None:
        writer.add_sliding_window_pattern([True, False, True, True, False, True, True][:size])

    path = write(tmp_path / "tiny.gguf", model_of("gemma3"), "gemma3", more)
    if size == 7:
        spec = spec_of(GGUFCheckpoint.open(path).config)
        assert spec.windows == (13, None, 13, 13, None, 13, 13)
        return
    with pytest.raises(CheckpointError, match=r"sliding_window_pattern.*each of 7 layers"):
        GGUFCheckpoint.open(path)
