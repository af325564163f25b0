"""The `config.json` a GGUF file would have had, rebuilt from its metadata and tensor shapes.

Only what the file states or its tensors show goes in; a value that is missing, of the wrong kind or
at odds with the tensors raises `CheckpointError`. Rotary scaling needs care: what GGUF stores as a
tensor of per-frequency divisors (Llama 3) has no Hugging Face spelling, so it becomes
`rope_parameters = {"rope_type": "freq_factors", "factors": [...]}` with one divisor per frequency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.errors import CheckpointError
from quire.load.gguf import GGUFFile, bad_field
from quire.models.spec import MAX_COUNT, MAX_EXPERTS, MAX_LAYERS, MAX_NUMBER, MIN_NUMBER

ROPE_FREQS = "rope_freqs.weight"
_OTHER_MODEL = "this model is not supported in GGUF: use its safetensors checkpoint"
_MOST = {"block_count": MAX_LAYERS, "expert_count": MAX_EXPERTS}


class Fields:
    """Typed, range-checked reads of the metadata under one architecture's prefix."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self.file = file
        self.arch = arch

    def error(
        self, key: str, value: object, reason: str, fix: str = _OTHER_MODEL
    ) -> CheckpointError:
        return bad_field(self.file.path, key, value, reason, fix)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer; `default` when absent, an error when there is none."""
        key = f"{self.arch}.{key}"
        value = self.file.metadata.get(key, default)
        if value is None:
            raise self.error(key, value, "missing from the metadata", "convert the model again")
        if isinstance(value, (list, np.ndarray)):
            raise self.error(key, value, "differs from layer to layer")
        most = _MOST.get(key.removeprefix(f"{self.arch}."), MAX_COUNT)
        if type(value) is not int or not 0 < value <= most:
            reason = f"want a whole number from 1 to {most}"
            raise self.error(key, value, reason, "convert the model again")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive finite number, rid of the digits that float32 storage adds to it."""
        key = f"{self.arch}.{key}"
        value = self.file.metadata.get(key, default)
        if type(value) not in (int, float) or not MIN_NUMBER <= value <= MAX_NUMBER:
            reason = f"want a number from {MIN_NUMBER:g} to {MAX_NUMBER:g}"
            raise self.error(key, value, reason, "convert the model again")
        # 9.999999747378752e-06 was written as 1e-05; the shortest float32 spelling gets it back.
        return float(str(np.float32(value))) if float(np.float32(value)) == value else float(value)

    def text(self, key: str) -> str | None:
        value = self.file.metadata.get(f"{self.arch}.{key}")
        if value is not None and not isinstance(value, str):
            raise self.error(
                f"{self.arch}.{key}", value, "want a string", "convert the model again"
            )
        return value

    def token_id(self, role: str, vocab_size: int) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        value = self.file.metadata.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < vocab_size):
            reason = f"want a token id below {vocab_size}"
            raise self.error(key, value, reason, "convert the model again")
        return value


def build_config(file: GGUFFile, arch: str, hf_class: str) -> dict[str, Any]:
    """Keys as in `config.json`; GPT-2 gets its own spellings beside the common ones."""
    fields = Fields(file, arch)
    _refuse_unsupported(fields)
    hidden = fields.count("embedding_length")
    heads = fields.count("attention.head_count")
    config: dict[str, Any] = {
        "architectures": [hf_class],
        "model_type": arch,
        "hidden_size": hidden,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": fields.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", heads),
        "head_dim": _head_dim(fields, hidden, heads),
        "max_position_embeddings": fields.count("context_length"),
        "vocab_size": _vocab_size(fields, hidden),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors
        or "blk.0.attn_qkv.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "torch_dtype": "float16",  # quantised files state none; activations are made for it
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        if (token := fields.token_id(role, config["vocab_size"])) is not None:
            config[f"{key}_token_id"] = token
    config |= _gpt2_keys(fields, config) if arch == "gpt2" else _rotary_keys(fields, config)
    if arch in _GEMMA:
        return config | _gemma_keys(fields, config)
    return config | _expert_keys(fields)


# Architectures with experts, and the model_type each then is.
_SPARSE = {"llama": "mixtral", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
_SOFTMAX = 1  # of the gating functions


def _expert_keys(fields: Fields) -> dict[str, Any]:
    """Keys of a mixture of experts; none for a dense model."""
    arch = fields.arch
    if arch not in _SPARSE or (arch == "llama" and not _num_experts(fields)):
        return {}
    gating = fields.count("expert_gating_func", _SOFTMAX)
    if gating != _SOFTMAX:
        raise fields.error(f"{arch}.expert_gating_func", gating, "only softmax is known here")
    if (scale := fields.number("expert_weights_scale", 1.0)) != 1.0:
        raise fields.error(f"{arch}.expert_weights_scale", scale, "only 1 is known here")
    num_experts = fields.count("expert_count")
    keys: dict[str, Any] = {
        "model_type": _SPARSE[arch],
        "num_experts": num_experts,
        "num_local_experts": num_experts,
        "num_experts_per_tok": fields.count("expert_used_count"),
    }
    if arch != "llama":
        width = _size(fields, "blk.0.ffn_gate_exps.weight", 1)  # early files do not state it
        keys["moe_intermediate_size"] = fields.count("expert_feed_forward_length", width)
        keys["norm_topk_prob"] = arch == "qwen3moe"  # no file says; the models are known
    if arch == "qwen2moe":
        width = _size(fields, "blk.0.ffn_gate_shexp.weight", 0)
        shared = fields.count("expert_shared_feed_forward_length", width)
        keys |= {"shared_expert_intermediate_size": shared, "qkv_bias": True}
    return keys


def _size(fields: Fields, name: str, dim: int) -> int | None:
    tensor = fields.file.tensors.get(name)
    return tensor.shape[dim] if tensor is not None and len(tensor.shape) > dim else None


def _num_experts(fields: Fields) -> int:
    value = fields.file.metadata.get(f"{fields.arch}.expert_count", 0)
    if type(value) is not int or value < 0:
        raise fields.error(f"{fields.arch}.expert_count", value, "want a whole number")
    return value


def _refuse_unsupported(fields: Fields) -> None:
    metadata = fields.file.metadata
    if (experts := _num_experts(fields)) and fields.arch not in _SPARSE:
        raise fields.error(f"{fields.arch}.expert_count", experts, "mixture of experts")
    shards = metadata.get("split.count", 0)
    if type(shards) is int and shards > 1:
        fix = "merge the parts into one file first (gguf-split --merge)"
        raise fields.error("split.count", shards, "only part of a model", fix)


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    dim = fields.count("attention.key_length", None if hidden % heads else hidden // heads)
    if (value_dim := fields.count("attention.value_length", dim)) != dim:
        key = f"{fields.arch}.attention.value_length"
        raise fields.error(key, value_dim, f"differs from the key length {dim}")
    return dim


def _vocab_size(fields: Fields, hidden: int) -> int:
    table = fields.file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2 or table.shape[1] != hidden:
        shape = None if table is None else table.shape
        raise fields.error("shape of 'token_embd.weight'", shape, f"want [vocab, {hidden}]")
    return table.shape[0]


def _gpt2_keys(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "n_embd": config["hidden_size"],
        "n_inner": config["intermediate_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "n_positions": config["max_position_embeddings"],
        "layer_norm_epsilon": fields.number("attention.layer_norm_epsilon", 1e-5),
        "activation_function": "gelu_new",
    }


def _rotary_keys(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    if (rotated := fields.count("rope.dimension_count", config["head_dim"])) != config["head_dim"]:
        reason = f"rotates part of a head of {config['head_dim']}"
        raise fields.error(f"{fields.arch}.rope.dimension_count", rotated, reason)
    keys: dict[str, Any] = {
        "hidden_act": "silu",
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
    }
    if f"{fields.arch}.attention.sliding_window" in fields.file.metadata:
        keys["sliding_window"] = fields.count("attention.sliding_window")
    scaling = _rope_scaling(fields)
    if ROPE_FREQS in fields.file.tensors:
        if scaling is not None:
            raise fields.error("rope scaling", scaling, f"comes on top of {ROPE_FREQS}")
        factors = _freq_factors(fields, config["head_dim"] // 2)
        keys["rope_parameters"] = {"rope_type": "freq_factors", "factors": factors}
    elif scaling is not None:
        keys["rope_scaling"] = scaling
    return keys


# Gemma's architectures, and the model_type of each.
_GEMMA = {"gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text"}
# No file states the query scale. Models with this many layers, the 27B of each kind, take it from
# the hidden size by head, all others from the head itself.
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
_GEMMA_PERIOD = {"gemma2": 2, "gemma3": 6}  # the last layer of each period sees everything


def _gemma_keys(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma has beyond Llama; older files leave most of it to the reader."""
    arch = fields.arch
    keys: dict[str, Any] = {
        "model_type": _GEMMA[arch],
        "torch_dtype": "bfloat16",  # its hidden states outgrow float16
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
    }
    if arch == "gemma":
        return keys
    heads, num_layers = config["num_attention_heads"], config["num_hidden_layers"]
    is_27b = num_layers == _GEMMA_27B[arch]
    scalar = config["hidden_size"] // heads if is_27b else config["head_dim"]
    keys["query_pre_attn_scalar"] = scalar
    keys["sliding_window"] = fields.count("attention.sliding_window", 4096)
    keys["layer_types"] = [
        "sliding_attention" if is_local else "full_attention"
        for is_local in _local_layers(fields, num_layers)
    ]
    for cap, usual in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        stated = arch == "gemma2" or f"{arch}.{cap}" in fields.file.metadata
        keys[cap] = fields.number(cap, usual) if stated else None
    if arch == "gemma3":
        full = config.get("rope_scaling") or {"rope_type": "default"}
        local = fields.number("rope.freq_base_swa", 10000.0)
        keys["rope_parameters"] = {
            "full_attention": {**full, "rope_theta": config["rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
        keys["rope_scaling"] = None
    return keys


def _local_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Which layers have a window: listed one by one, or all but the last of each period."""
    key = "attention.sliding_window_pattern"
    listed = fields.file.metadata.get(f"{fields.arch}.{key}")
    listed = listed.tolist() if isinstance(listed, np.ndarray) else listed
    if isinstance(listed, list):
        if len(listed) != num_layers or not all(type(is_local) is bool for is_local in listed):
            reason = f"want a period or one bool for each of {num_layers} layers"
            raise fields.error(f"{fields.arch}.{key}", listed, reason, "convert the model again")
        return listed
    period = fields.count(key, _GEMMA_PERIOD[fields.arch])
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _rope_scaling(fields: Fields) -> dict[str, Any] | None:
    kind = fields.text("rope.scaling.type")
    # `scale_linear` is the spelling of files from before scaling types existed.
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind is None:
        kind = "linear" if factor != 1.0 else "none"
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise fields.error(f"{fields.arch}.rope.scaling.type", kind, "known: none, linear, yarn")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = f"{fields.arch}.rope.scaling.original_context_length"
    if original in fields.file.metadata:
        length = fields.count("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = length
    for name in ("beta_fast", "beta_slow"):
        if f"{fields.arch}.rope.scaling.yarn_{name}" in fields.file.metadata:
            scaling[name] = fields.number(f"rope.scaling.yarn_{name}", 1.0)
    boost = fields.number(
        "rope.scaling.yarn_attn_factor", fields.number("rope.scaling.attn_factor", 1.0)
    )
    if boost != 1.0:
        # GGUF multiplies YaRN's own attention scale; Hugging Face states the product.
        scaling["attention_factor"] = boost * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return scaling


def _freq_factors(fields: Fields, count: int) -> list[float]:
    shape = fields.file.tensors[ROPE_FREQS].shape
    if shape != (count,):
        raise fields.error(f"shape of {ROPE_FREQS!r}", shape, f"want [{count}], half a head")
    factors: list[float] = fields.file.read(ROPE_FREQS).float().tolist()
    if not all(0 < f < math.inf for f in factors):
        raise fields.error(
            ROPE_FREQS, factors, "divisors must be positive", "convert the model again"
        )
    return factors
