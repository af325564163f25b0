"""What heads compute by their published layouts: transformers' layers and plain torch, in fp32.

Nothing is cached: every guess runs the whole sequence again. Targets are the same folders as
transformers loads them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from tests.spec.heads import config_of, write

# A head's own step: features [positions, hidden] and the tokens behind them -> logits of the last
# position, and the feature that a guess goes on with.
Guess = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def target_of(folder: Path) -> Any:
    made = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return made.eval()


def streams_of(target: Any, tokens: list[int]) -> list[Tensor]:
    """The input of every layer, what comes behind the last, and what follows the last norm."""
    normed: list[Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda _, args: normed.append(args[0]))
    out = target(torch.tensor([tokens]), output_hidden_states=True)
    hook.remove()
    *inputs, last = out.hidden_states
    return [states[0] for states in (*inputs, *normed, last)]


def causal(length: int) -> Tensor:
    """[1, 1, length, length], -inf where a query comes before its key."""
    return torch.full((length, length), -torch.inf).triu(1)[None, None]


def linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight.data = weight
    return made


def normed(kind: type[nn.Module], weight: Tensor, eps: float) -> nn.Module:
    made = kind(len(weight), eps)
    made.weight.data = weight
    return made


def medusa_logits(folder: Path, hidden: Tensor, head: int) -> Tensor:
    tensors = load_file(folder / "model.safetensors")
    block = nn.functional.linear(
        hidden, tensors[f"{head}.0.linear.weight"], tensors[f"{head}.0.linear.bias"]
    )
    return (hidden + nn.functional.silu(block)) @ tensors[f"{head}.1.weight"].T


def eagle3_guess(folder: Path, target: Any) -> tuple[Callable[[list[Tensor]], Tensor], Guess]:
    """(features of streams, a head's step), of either layout."""
    own, stored = config_of(folder), load_file(folder / "model.safetensors")
    tensors = {name.replace("layers.0.", "midlayer."): t for name, t in stored.items()}
    inner = own.pop("eagle_config", own)
    layered = own.get("transformer_layer_config", own)
    config = transformers.LlamaConfig(**{k: v for k, v in layered.items() if k != "architectures"})
    config._attn_implementation = "eager"
    layer, rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = tensors[f"midlayer.self_attn.{name}.weight"]
        setattr(layer.self_attn, name, linear(weight))
    kept = {n.removeprefix("midlayer."): t for n, t in tensors.items() if "midlayer" in n}
    hidden_norm = normed(LlamaRMSNorm, kept.pop("hidden_norm.weight"), config.rms_norm_eps)
    layer.load_state_dict(kept)
    norm = normed(LlamaRMSNorm, tensors["norm.weight"], config.rms_norm_eps)
    chosen = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    embed = target.get_input_embeddings().weight
    embed = tensors.get("embed_tokens.weight", embed)

    def features(streams: list[Tensor]) -> Tensor:
        read = [streams[i] for i in inner["eagle_aux_hidden_state_layer_ids"]]
        if own.get("fc_norm"):
            weights = [tensors[f"fc_norm.{i}.weight"] for i in range(len(read))]
            norms = [normed(LlamaRMSNorm, weight, config.rms_norm_eps) for weight in weights]
            read = [norm(states) for norm, states in zip(norms, read, strict=True)]
        joined = torch.cat(read, -1)
        if own.get("norm_before_fc"):
            joined = normed(LlamaRMSNorm, tensors["input_norm.weight"], config.rms_norm_eps)(joined)
        return joined @ tensors["fc.weight"].T

    def guess(features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = layer.input_layernorm(embed[tokens])
        normed_features = hidden_norm(features)
        x = torch.cat((x, normed_features), -1)[None]
        angles = rotary(x, torch.arange(len(tokens))[None])
        attended, _ = layer.self_attn(
            hidden_states=x, position_embeddings=angles, attention_mask=causal(len(tokens))
        )
        stream = normed_features if own.get("norm_before_residual") else features
        stream = stream + attended[0]
        stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
        wide = torch.full((config.vocab_size,), -torch.inf)
        last = norm(stream[-1:])
        wide[chosen] = (last @ tensors["lm_head.weight"].T)[0]
        return wide, last if own.get("norm_output") else stream[-1:]

    return features, guess


def mtp_guess(folder: Path, spare: Path, target: Any) -> Guess:
    """`spare` is where the layer is saved as one layer more, so that transformers reads it."""
    config, tensors = config_of(folder), load_file(folder / "model.safetensors")
    last = config["num_hidden_layers"]
    at = f"model.layers.{last}."
    config |= {"num_hidden_layers": last + 1, "num_nextn_predict_layers": 0}
    special = {n for n in tensors if n.startswith((f"{at}e", f"{at}hnorm", f"{at}shared_head"))}
    write(spare, config, {n: t for n, t in tensors.items() if n not in special})
    deeper = target_of(spare)
    layer, eps = deeper.model.layers[last], config["rms_norm_eps"]
    embed_norm, state_norm, norm = (
        normed(DeepseekV3RMSNorm, tensors[f"{at}{name}.weight"], eps)
        for name in ("enorm", "hnorm", "shared_head.norm")
    )

    def guess(features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        embedded = embed_norm(target.get_input_embeddings()(tokens))
        x = torch.cat((embedded, state_norm(features)), -1) @ tensors[f"{at}eh_proj.weight"].T
        positions = torch.arange(len(tokens))[None]
        angles = deeper.model.rotary_emb(x[None], positions)
        out = layer(
            x[None],
            attention_mask=causal(len(tokens)),
            position_ids=positions,
            position_embeddings=angles,
        )
        out = norm((out[0] if isinstance(out, tuple) else out)[0, -1:])
        return target.lm_head(out)[0], out

    return guess


def chain(
    features: Tensor, tokens: list[int], start: int, depth: int, guess: Guess
) -> list[Tensor]:
    """Logits of `depth` guesses behind tokens[start], whose tokens were those of `tokens`."""
    found = []
    features = features[:start]
    for step in range(depth):
        behind = torch.tensor(tokens[1 : start + step + 1])
        logits, feature = guess(features, behind)
        found.append(logits)
        features = torch.cat((features, feature))
    return found
