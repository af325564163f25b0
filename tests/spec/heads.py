"""Tiny heads in their published layouts, with random weights or such that they guess right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.models.heads.mtp import mtp_names, mtp_spec
from quire.models.registry import spec_of

VOCAB = 258


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    made = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def numbers(seed: int, *shapes: tuple[int, ...], std: float = 0.15) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * std for shape in shapes]


def medusa(folder: Path, hidden: int, num_heads: int = 3, **own: Tensor) -> Path:
    """The authors' layout; `own` replaces tensors, dots written as underscores."""
    tensors: dict[str, Tensor] = {}
    for head in range(num_heads):
        weight, bias, product = numbers(7 + head, (hidden, hidden), (hidden,), (VOCAB, hidden))
        tensors |= {f"{head}.0.linear.weight": weight, f"{head}.0.linear.bias": bias}
        tensors[f"{head}.1.weight"] = product
    tensors |= {name.replace("_", "."): tensor for name, tensor in own.items()}
    return write(folder, {"medusa_num_heads": num_heads, "medusa_num_layers": 1}, tensors)


def eagle3_config(hidden: int, reads: tuple[int, ...], outputs: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "draft_vocab_size": outputs,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(reads)},
    }


def eagle3_tensors(hidden: int, num_reads: int, outputs: int, seed: int = 5) -> dict[str, Tensor]:
    """As published: q, k and v read embedding and feature side by side."""
    shapes = {
        "fc.weight": (hidden, num_reads * hidden),
        "midlayer.self_attn.q_proj.weight": (64, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (32, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (32, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, 64),
        "midlayer.mlp.gate_proj.weight": (48, hidden),
        "midlayer.mlp.up_proj.weight": (48, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, 48),
        "lm_head.weight": (outputs, hidden),
    }
    made = dict(zip(shapes, numbers(seed, *shapes.values()), strict=True))
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    for name in (*(f"midlayer.{norm}" for norm in norms), "norm"):
        made[f"{name}.weight"] = (
            torch.rand(hidden, generator=torch.Generator().manual_seed(3)) + 0.5
        )
    chosen = torch.arange(outputs) * VOCAB // outputs  # every second or third token
    made["d2t"] = chosen - torch.arange(outputs)
    made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, chosen, True)
    return made


def eagle3(
    folder: Path, hidden: int, reads: tuple[int, ...] = (0, 1, 2), outputs: int = 96
) -> Path:
    tensors = eagle3_tensors(hidden, len(reads), outputs)
    return write(folder, eagle3_config(hidden, reads, outputs), tensors)


def speculators_eagle3(folder: Path, hidden: int, **flags: bool) -> Path:
    """The other layout: a nested config, other names, an embedding of its own, more norms."""
    reads, outputs = (0, 1), 96
    tensors = eagle3_tensors(hidden, len(reads), outputs, seed=8)
    made = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    made["embed_tokens.weight"], *norms = numbers(9, (VOCAB, hidden), (hidden,), (hidden,))
    if flags.get("fc_norm"):
        made |= {f"fc_norm.{i}.weight": 1 + norm for i, norm in enumerate(norms)}
    if flags.get("norm_before_fc"):
        made["input_norm.weight"] = 1 + torch.cat(norms)
    flat = eagle3_config(hidden, reads, outputs)
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": outputs,
        "norm_before_residual": False,
        **flat.pop("eagle_config"),
        **flags,
        "transformer_layer_config": flat,
    }
    return write(folder, config, made)


def head_for(method: str, folder: Path, family: str) -> dict[str, Any]:
    """A `speculative_config` with a random head for a tiny model, made where it is missing."""
    asked: dict[str, Any] = {"method": method, "adaptive": False, "num_speculative_tokens": 3}
    if method == "mtp":
        return asked  # in the model's own folder
    name = method.split("+")[-1]
    at = folder / f"{name}-{family}"
    if not at.exists():
        config = config_of(folder / family)
        {"eagle3": eagle3, "medusa": medusa}[name](at, config["hidden_size"])
    return {**asked, "model": str(at)}


def has_mtp(folder: Path) -> bool:
    return bool(config_of(folder).get("num_nextn_predict_layers"))


def add_mtp(folder: Path, seed: int = 11) -> None:
    """Give a folder of DeepSeek-V3's kind the layer behind its last."""
    config, tensors = config_of(folder), load_file(folder / "model.safetensors")
    spec = spec_of(config)
    at, like = f"model.layers.{spec.num_layers}.", f"model.layers.{spec.num_layers - 1}."
    generator = torch.Generator().manual_seed(seed)
    layer = {at + n.removeprefix(like): t for n, t in tensors.items() if n.startswith(like)}
    made = {n: torch.randn(t.shape, generator=generator) * 0.15 for n, t in layer.items()}
    hidden = spec.hidden_size
    made[at + "eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.15
    for name in ("enorm", "hnorm", "shared_head.norm"):
        made[f"{at}{name}.weight"] = torch.rand(hidden, generator=generator) + 0.5
    names = mtp_names(mtp_spec(set(made), spec), spec.num_layers)
    assert set(made) <= set(names), "the table of names has no line for these"
    write(folder, {**config, "num_nextn_predict_layers": 1}, tensors | made)
