"""GGUF as a Hugging Face checkpoint: names, layouts and config, with transformers as the oracle.

The q/k row order and GPT-2's transposed weights are the two places where a wrong reader still
loads and still talks, only worse; every tensor is compared, not a sample.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.errors import CheckpointError
from quire.load.gguf_checkpoint import GGUFCheckpoint

gguf = pytest.importorskip("gguf")

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 48, 64, 4, 2, 16, 96, 2
Q8_0 = gguf.GGMLQuantizationType.Q8_0
F16 = gguf.GGMLQuantizationType.F16
Tensors = dict[str, np.ndarray[Any, Any]]


def tensors_of(arch: str, tied: bool = False) -> Tensors:
    """Random weights under GGUF names, in GGUF layouts."""
    rng = np.random.default_rng(7)

    def rand(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape, dtype=np.float32)

    out: Tensors = {"token_embd.weight": rand(VOCAB, HIDDEN), "output_norm.weight": rand(HIDDEN)}
    if not tied:
        out["output.weight"] = rand(VOCAB, HIDDEN)
    if arch == "gpt2":
        out |= {"position_embd.weight": rand(32, HIDDEN), "output_norm.bias": rand(HIDDEN)}
    for i in range(LAYERS):
        layer: Tensors = {"attn_norm.weight": rand(HIDDEN), "ffn_norm.weight": rand(HIDDEN)}
        linear = {"ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
        if arch == "gpt2":
            linear |= {"attn_qkv": (3 * HIDDEN, HIDDEN), "attn_output": (HIDDEN, HIDDEN)}
            layer |= {f"{n}.bias": rand(rows) for n, (rows, _) in linear.items()}
            layer |= {"attn_norm.bias": rand(HIDDEN), "ffn_norm.bias": rand(HIDDEN)}
        else:
            keys = {
                "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
                "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            }
            query = {"attn_q": (HEADS * HEAD_DIM, HIDDEN)}
            linear |= keys | query
            linear |= {"ffn_gate": (INNER, HIDDEN), "attn_output": (HIDDEN, HEADS * HEAD_DIM)}
            if arch == "qwen2":
                layer |= {f"{n}.bias": rand(rows) for n, (rows, _) in (keys | query).items()}
            if arch == "qwen3":
                layer |= {
                    "attn_q_norm.weight": rand(HEAD_DIM),
                    "attn_k_norm.weight": rand(HEAD_DIM),
                }
        layer |= {f"{n}.weight": rand(*shape) for n, shape in linear.items()}
        out |= {f"blk.{i}.{name}": value for name, value in layer.items()}
    return out


def write(
    path: Path,
    arch: str,
    tensors: Tensors,
    more: Callable[[Any], None] | None = None,
    quant: Any = None,
    blocks_of: Any = None,
) -> Path:
    """`blocks_of`: the type of those that are bytes."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(32)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_vocab_size(VOCAB)
    if arch == "gpt2":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(50000.0)
    if more is not None:
        more(writer)
    for name, value in tensors.items():
        if value.dtype == np.uint8:
            writer.add_tensor(name, value, raw_dtype=blocks_of)
        elif quant is not None and value.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(value, quant), raw_dtype=quant)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("quant", [None, F16, Q8_0], ids=["f32", "f16", "q8_0"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gpt2"])
def test_same_tensors_as_transformers(tmp_path: Path, arch: str, quant: Any) -> None:
    transformers = pytest.importorskip("transformers")
    path = write(tmp_path / "tiny.gguf", arch, tensors_of(arch), quant=quant)
    checkpoint = GGUFCheckpoint.open(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    want = {k: v for k, v in model.state_dict().items() if not k.endswith(".attn.bias")}
    assert set(checkpoint.names()) == set(want)
    for name, tensor in want.items():
        assert checkpoint.shape(name) == tuple(tensor.shape), name
        assert torch.equal(checkpoint.read(name).float(), tensor), name
    assert checkpoint.config["architectures"] == [type(model).__name__]


def test_llama_rows_are_paired_by_halves(tmp_path: Path) -> None:
    """Spelled out: GGUF row 2i + j of a head is Hugging Face row j * dim / 2 + i."""
    tensors = tensors_of("llama")
    rows = np.arange(KV_HEADS * HEAD_DIM, dtype=np.float32)
    tensors["blk.0.attn_k.weight"] = np.repeat(rows[:, None], HIDDEN, axis=1)
    tensors["blk.0.attn_k.bias"] = rows
    checkpoint = GGUFCheckpoint.open(write(tmp_path / "l.gguf", "llama", tensors))
    want = [h * 16 + 2 * i + j for h in range(KV_HEADS) for j in range(2) for i in range(8)]
    prefix = "model.layers.0.self_attn.k_proj"
    assert checkpoint.read(f"{prefix}.weight")[:, 5].tolist() == want
    assert checkpoint.read(f"{prefix}.bias").tolist() == want


def test_llama_config(tmp_path: Path) -> None:
    def more(writer: Any) -> None:
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    tensors = tensors_of("llama", tied=True)
    config = GGUFCheckpoint.open(write(tmp_path / "l.gguf", "llama", tensors, more)).config
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 32,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
    }


def test_other_configs(tmp_path: Path) -> None:
    gpt2 = GGUFCheckpoint.open(write(tmp_path / "g", "gpt2", tensors_of("gpt2", tied=True))).config
    assert (gpt2["n_embd"], gpt2["n_layer"], gpt2["n_head"]) == (HIDDEN, LAYERS, HEADS)
    assert (gpt2["n_positions"], gpt2["n_inner"], gpt2["layer_norm_epsilon"]) == (32, INNER, 1e-5)
    assert "rope_theta" not in gpt2
    qwen = GGUFCheckpoint.open(write(tmp_path / "q", "qwen2", tensors_of("qwen2"))).config
    assert qwen["attention_bias"] is True
    assert qwen["tie_word_embeddings"] is False


def test_rope_scaling(tmp_path: Path) -> None:
    def linear(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    def yarn(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(8.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    def longrope(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)

    tensors = tensors_of("llama")
    opened = [
        GGUFCheckpoint.open(write(tmp_path / "l", "llama", tensors, m)) for m in (linear, yarn)
    ]
    assert opened[0].config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert opened[1].config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
    }
    with pytest.raises(CheckpointError, match="longrope"):
        GGUFCheckpoint.open(write(tmp_path / "l", "llama", tensors, longrope))


def test_rope_factors_become_config(tmp_path: Path) -> None:
    tensors = tensors_of("llama")
    tensors["rope_freqs.weight"] = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    checkpoint = GGUFCheckpoint.open(write(tmp_path / "l", "llama", tensors))
    assert checkpoint.config["rope_parameters"] == {
        "rope_type": "freq_factors",
        "factors": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    }
    assert not any("rope" in name for name in checkpoint.names())
    tensors["rope_freqs.weight"] = tensors["rope_freqs.weight"][:3]
    with pytest.raises(CheckpointError, match="half a head"):
        GGUFCheckpoint.open(write(tmp_path / "l", "llama", tensors))


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def having(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: np.zeros(shape, np.float32)})


WRONG: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no embedding": (without("token_embd.weight"), "token_embd"),
    "no norm": (without("output_norm.weight"), r"output_norm\.weight"),
    "no projection": (without("blk.1.ffn_up.weight"), r"blk\.1\.ffn_up\.weight"),
    "narrow embedding": (having("token_embd.weight", VOCAB, 32), r"\(48, 32\)"),
    "one layer too many": (having("blk.2.attn_q.weight", 64, 64), r"blk\.2\.attn_q"),
    "a second layer 0": (having("blk.00.attn_q.weight", 64, 64), r"blk\.00"),
    "unknown tensor": (having("blk.0.ffn_gate_inp.weight", 8, 64), "ffn_gate_inp"),
    "wrong rows": (having("blk.0.attn_q.weight", 60, 64), "4 heads of 16"),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_unlike_the_config(tmp_path: Path, name: str) -> None:
    change, says = WRONG[name]
    tensors = tensors_of("llama")
    change(tensors)
    with pytest.raises(CheckpointError, match=says):
        GGUFCheckpoint.open(write(tmp_path / "l.gguf", "llama", tensors))


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "experts": (lambda w: w.add_expert_count(8), "expert_used_count.*missing"),
    "shards": (lambda w: w.add_uint16("split.count", 3), "merge"),
    "part of a head": (lambda w: w.add_rope_dimension_count(8), "part of a head"),
    "eos": (lambda w: w.add_eos_token_id(VOCAB), "below 48"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_metadata_that_is_not_supported(tmp_path: Path, name: str) -> None:
    more, says = REFUSED[name]
    with pytest.raises(CheckpointError, match=says):
        GGUFCheckpoint.open(write(tmp_path / "l.gguf", "llama", tensors_of("llama"), more))


def test_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"mamba.*known: llama, qwen2, qwen3, gpt2"):
        GGUFCheckpoint.open(write(tmp_path / "m.gguf", "mamba", {}))


@pytest.mark.skipif(
    not os.environ.get("QUIRE_LONG_TESTS"), reason="transformers takes 17 s: QUIRE_LONG_TESTS=1"
)
def test_real_file_equals_transformers(default_model_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    checkpoint = GGUFCheckpoint.open(default_model_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        default_model_path.parent, gguf_file=default_model_path.name, dtype=torch.float32
    )
    want = model.state_dict()
    assert set(want) - set(checkpoint.names()) <= {"lm_head.weight"}  # tied
    for name in checkpoint.names():
        assert torch.equal(checkpoint.read(name).float(), want[name]), name
