"""What a GGUF file states of a model: copied from a GGUF source, or made of config and tokenizer.

What is made is checked by reading it back: a model or a tokenizer that GGUF cannot spell is
refused, not spelled almost right. The reverse of `load/gguf_config.py` and `text/gguf_vocab.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.compress.calibration import BUILT_IN
from quire.compress.source import Source
from quire.errors import CheckpointError, NotSupported
from quire.load.gguf import GGUFFile
from quire.load.gguf_checkpoint import gguf_arch
from quire.models.spec import ModelSpec
from quire.text.gguf_vocab import tokenizer_from_gguf
from quire.text.tokenizer import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
CUTS = ("llama-bpe", "qwen2", "smollm", "gpt-2")  # of `tokenizer.ggml.pre`
SPOKEN = "x =  12\n\n\tdéjà vu 𝔘 1234567 don't  日本語 <s> [INST]"
_NOT_OURS = ("general.file_type", "general.quantization_version", "split.")


def metadata_of(source: Source, file_type: int) -> dict[str, Any]:
    """Raises NotSupported where GGUF has no words for the model."""
    own = {"general.quantization_version": 2, "general.file_type": file_type}
    if source.is_gguf:
        stated = GGUFFile.open(source.path).metadata
        return {k: v for k, v in stated.items() if not k.startswith(_NOT_OURS)} | own
    arch = gguf_arch(source.hf_class)
    found: dict[str, Any] = {"general.architecture": arch, "general.name": source.path.name}
    found |= {f"{arch}.{key}": value for key, value in _sizes(source.spec, source.config).items()}
    return found | own | _tokenizer(source.tokenizer, source.spec.vocab_size)


def _sizes(spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "context_length": spec.max_positions,
        "embedding_length": spec.hidden_size,
        "block_count": spec.num_layers,
        "feed_forward_length": spec.ffn_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
    }
    epsilon = "attention.layer_norm_rms_epsilon"
    found[epsilon if spec.norm == "rms" else "attention.layer_norm_epsilon"] = spec.norm_eps
    if spec.rope is not None:
        found |= _rope(spec)
    if spec.windows and any(spec.windows):
        found["attention.sliding_window"] = max(w for w in spec.windows if w is not None)
        found["attention.sliding_window_pattern"] = [w is not None for w in spec.windows]
    for key, value in (
        ("attn_logit_softcapping", spec.attn_softcap),
        ("final_logit_softcapping", spec.logit_softcap),
    ):
        if value is not None:
            found[key] = value
    if spec.moe is not None:
        found |= {
            "expert_count": spec.moe.router.num_experts,
            "expert_used_count": spec.moe.router.top_k,
            "expert_feed_forward_length": spec.moe.ffn_size,
        }
        if spec.moe.shared_ffn_size:
            found["expert_shared_feed_forward_length"] = spec.moe.shared_ffn_size
    return found


def _rope(spec: ModelSpec) -> dict[str, Any]:
    assert spec.rope is not None
    rope = spec.rope
    if rope.kind not in ("default", "linear", "yarn"):
        raise NotSupported(
            f"the model's rotary scaling is {rope.kind!r}, which is not written to GGUF; take a"
            " safetensors method"
        )
    found: dict[str, Any] = {"rope.freq_base": rope.theta, "rope.dimension_count": rope.dim}
    if spec.local_rope is not None:
        found["rope.freq_base_swa"] = spec.local_rope.theta
    if rope.kind != "default":
        found |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
        found["rope.scaling.original_context_length"] = rope.original_max
    return found


# ------------------------------------------------------------ tokenizer


def _tokenizer(tokenizer: Tokenizer | None, vocab_size: int) -> dict[str, Any]:
    if tokenizer is None:
        raise NotSupported("the model has no tokenizer, without which a GGUF file is of no use")
    said = json.loads(tokenizer.to_json())
    model, vocab = said["model"], said["model"].get("vocab", {})
    if model.get("type") != "BPE":
        raise NotSupported(
            f"the tokenizer is a {model.get('type')}, of which GGUF files here know BPE alone; take"
            " a safetensors method"
        )
    tokens, types = _tokens(said, vocab, vocab_size)
    found: dict[str, Any] = {"tokenizer.ggml.tokens": tokens}
    found |= _ids(tokenizer)
    if tokenizer.chat_template is not None:
        found["tokenizer.chat_template"] = tokenizer.chat_template
    if model.get("byte_fallback"):
        types = [_BYTE if _is_byte(t) else kind for t, kind in zip(tokens, types, strict=True)]
        scores = np.array([-float(i) for i in range(len(tokens))], dtype="<f4")
        found |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
        cuts: tuple[str, ...] = ("default",)
    else:
        merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
        found |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": merges}
        cuts = CUTS
    found["tokenizer.ggml.token_type"] = np.array(types, dtype="<i4")
    for cut in cuts:
        made = {**found, "tokenizer.ggml.pre": cut}
        if _speaks_alike(made, tokenizer):
            return made
    raise NotSupported(
        "the tokenizer cuts text in a way that no GGUF file here can name"
        f" ({', '.join(CUTS)} were tried); take a safetensors method"
    )


def _tokens(
    said: Mapping[str, Any], vocab: Mapping[str, int], vocab_size: int
) -> tuple[list[str], list[int]]:
    """By id, gaps filled with names that no text has."""
    added = {item["id"]: item for item in said.get("added_tokens", [])}
    size = max(vocab_size, 1 + max((*vocab.values(), *added), default=0))
    tokens, types = [f"[PAD{i}]" for i in range(size)], [_UNUSED] * size
    for token, i in vocab.items():
        tokens[i], types[i] = token, _NORMAL
    for i, item in added.items():
        tokens[i], types[i] = item["content"], _CONTROL if item["special"] else _USER_DEFINED
    return tokens, types


def _ids(tokenizer: Tokenizer) -> dict[str, Any]:
    roles = {"bos": tokenizer.bos_id, "padding": tokenizer.pad_id, "unknown": tokenizer.unk_id}
    roles |= {role: i for role, i in zip(("eos", "eot"), tokenizer.eos_ids, strict=False)}
    found: dict[str, Any] = {
        f"tokenizer.ggml.{role}_token_id": i for role, i in roles.items() if i is not None
    }
    begins = tokenizer.encode("a")[:1] == [tokenizer.bos_id]
    return found | {"tokenizer.ggml.add_bos_token": begins}


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _speaks_alike(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether what a reader makes of it cuts text as the original does."""
    try:
        made = Tokenizer.from_gguf_vocab(tokenizer_from_gguf(metadata, "the file to be written"))
    except CheckpointError:
        return False
    text = BUILT_IN.read_text(encoding="utf-8")[:40_000]
    return all(made.encode(some) == tokenizer.encode(some) for some in (SPOKEN, text))
