"""A GGUF file seen as a Hugging Face checkpoint: its names, its layouts, its config.

Five things differ between the two worlds, and all are undone here so that nobody downstream knows
of them: tensor names, GPT-2's Conv1D weights (stored [out, in] in GGUF, [in, out] in Hugging Face),
the rows of q and k in `llama` files, which are reordered for rotary pairs (2i, 2i + 1) where
Hugging Face pairs i with i + dim / 2, experts, whose gates and ups are two tensors in GGUF and one
in Hugging Face, and Gemma's norms, to which GGUF has added the one that Hugging Face adds when it
runs. Reading is lazy; `gguf.py` owns the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.load.checkpoint import Stored
from quire.load.gguf import GGUFFile, bad_field
from quire.load.gguf_config import ROPE_FREQS, build_config
from quire.load.gguf_factors import factor_of, is_factor, times
from quire.quant.gguf_codes import can_code, coded
from quire.quant.weight import Weight


@dataclass(frozen=True, slots=True)
class _Naming:
    """How one architecture's tensors are called in Hugging Face checkpoints."""

    hf_class: str
    outer: Mapping[str, str]  # GGUF stem -> Hugging Face stem
    layer: str  # prefix of a layer's tensors
    inner: Mapping[str, str]  # stems within a layer
    biases: frozenset[str] = frozenset()  # inner and outer stems that must have a bias
    transposed: frozenset[str] = frozenset()  # inner stems with Conv1D weights
    permuted: frozenset[str] = frozenset()  # inner stems with rotary rows interleaved
    stacked: Mapping[str, str] = field(default_factory=dict)  # stems that hold all experts
    norms_from_one: bool = False  # norm weights are stored with one added


_LLAMA_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LLAMA_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DENSE = ("ffn_gate", "ffn_up", "ffn_down")
_SPARSE_INNER = {stem: name for stem, name in _LLAMA_INNER.items() if stem not in _DENSE}
_SPARSE_INNER |= {"ffn_gate_inp": "mlp.gate"}
_STACKED = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_SHARED_INNER = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_QWEN3_INNER = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA2_INNER = _LLAMA_INNER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2_OUTER = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2_INNER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_LLAMA_LAYER = "model.layers."
_NAMINGS: dict[str, _Naming] = {
    "llama": _Naming(
        "LlamaForCausalLM",
        _LLAMA_OUTER,
        _LLAMA_LAYER,
        _LLAMA_INNER,
        permuted=frozenset({"attn_q", "attn_k"}),
    ),
    "qwen2": _Naming(
        "Qwen2ForCausalLM",
        _LLAMA_OUTER,
        _LLAMA_LAYER,
        _LLAMA_INNER,
        biases=frozenset({"attn_q", "attn_k", "attn_v"}),
    ),
    "qwen3": _Naming("Qwen3ForCausalLM", _LLAMA_OUTER, _LLAMA_LAYER, _LLAMA_INNER | _QWEN3_INNER),
    "gpt2": _Naming(
        "GPT2LMHeadModel",
        _GPT2_OUTER,
        "transformer.h.",
        _GPT2_INNER,
        biases=frozenset(_GPT2_INNER) | {"output_norm"},
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
    "qwen2moe": _Naming(
        "Qwen2MoeForCausalLM",
        _LLAMA_OUTER,
        _LLAMA_LAYER,
        _SPARSE_INNER | _SHARED_INNER,
        biases=frozenset({"attn_q", "attn_k", "attn_v"}),
        stacked=_STACKED,
    ),
    "qwen3moe": _Naming(
        "Qwen3MoeForCausalLM",
        _LLAMA_OUTER,
        _LLAMA_LAYER,
        _SPARSE_INNER | _QWEN3_INNER,
        stacked=_STACKED,
    ),
    "gemma": _Naming(
        "GemmaForCausalLM", _LLAMA_OUTER, _LLAMA_LAYER, _LLAMA_INNER, norms_from_one=True
    ),
    "gemma2": _Naming(
        "Gemma2ForCausalLM", _LLAMA_OUTER, _LLAMA_LAYER, _GEMMA2_INNER, norms_from_one=True
    ),
    "gemma3": _Naming(
        "Gemma3ForCausalLM",
        _LLAMA_OUTER,
        _LLAMA_LAYER,
        _GEMMA2_INNER | _QWEN3_INNER,
        norms_from_one=True,
    ),
}
_MIXTRAL = replace(  # a `llama` file with experts
    _NAMINGS["llama"], hf_class="MixtralForCausalLM", inner=_SPARSE_INNER, stacked=_STACKED
)
# No leading zeros: "blk.00" would be a second name for layer 0.
_IN_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(\w+)\.(weight|bias)", re.ASCII)
_OUTSIDE = re.compile(r"(\w+)\.(weight|bias)", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Source:
    """The GGUF tensor behind a Hugging Face name, and what to undo when reading it."""

    name: str
    is_transposed: bool = False
    rotary_heads: int = 0  # heads whose rows are interleaved; 0 for none
    expert: int | None = None  # the tensor holds all experts, this one is meant
    is_row: bool = False  # a vector here, a matrix of one row in Hugging Face
    is_from_one: bool = False  # one was added to it


class GGUFCheckpoint:
    """`Checkpoint` over one GGUF file; `file` gives the metadata for the tokenizer."""

    def __init__(self, file: GGUFFile) -> None:
        arch = file.metadata.get("general.architecture")
        naming = _NAMINGS.get(arch) if isinstance(arch, str) else None
        if arch == "llama" and file.metadata.get("llama.expert_count"):
            naming = _MIXTRAL
        if naming is None:
            reason = f"no such architecture here; known: {', '.join(_NAMINGS)}"
            raise bad_field(file.path, "general.architecture", arch, reason, "use another model")
        self.file = file
        self.files: Sequence[Path] = (file.path,)
        self.config: Mapping[str, Any] = build_config(file, str(arch), naming.hf_class)
        self._sources = _translate(file, naming, self.config)
        _check_complete(file, naming, self.config["num_hidden_layers"])

    @classmethod
    def open(cls, path: str | Path) -> GGUFCheckpoint:
        return cls(GGUFFile.open(path))

    def names(self) -> Sequence[str]:
        return list(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._source(name)
        shape = self.file.tensors[source.name].shape
        if source.expert is not None:
            return shape[1:]
        if source.is_row:
            return (1, *shape)
        return shape[::-1] if source.is_transposed else shape

    def read(self, name: str) -> Tensor:
        source = self._source(name)
        factor = factor_of(self.file, source.name, source.expert)
        if factor is not None and (weight := self.packed(name)) is not None:
            return weight.dequantize().t() if source.is_transposed else weight.dequantize()
        tensor = self.file.read(source.name, source.expert)
        tensor = tensor if factor is None else tensor.float() * factor
        if source.is_row:
            return tensor.unsqueeze(0)
        if source.is_transposed:
            return tensor.t()
        if source.is_from_one:
            return tensor.float() - 1.0  # exact: what was stored came from fewer bits
        if source.rotary_heads:
            return _split_halves(tensor, source.rotary_heads)
        return tensor

    def stored(self, name: str) -> Stored:
        source = self._source(name)
        info = self.file.tensors[source.name]
        parts = 1 if source.expert is None else info.shape[0]
        return Stored(info.type.name, info.num_bytes // parts)

    def packed(self, name: str, rows: slice | None = None) -> Weight | None:
        source = self._source(name)
        info = self.file.tensors[source.name]
        is_matrix = len(info.shape) == (2 if source.expert is None else 3)
        if not is_matrix or not can_code(info.type):
            return None
        raw = self.file.raw(source.name, source.expert, rows)
        made = coded(raw, info.type)
        factor = factor_of(self.file, source.name, source.expert)
        weight = made if factor is None else times(made, factor)
        if source.rotary_heads and weight is not None:
            heads = source.rotary_heads * len(raw) // info.shape[0]
            return weight.pick(_split_halves(torch.arange(len(raw)), heads))
        return weight

    def _source(self, name: str) -> _Source:
        if (source := self._sources.get(name)) is None:
            raise CheckpointError(f"{self.file.path}: no tensor for {name!r}")
        return source


def _split_halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head from (0, 0', 1, 1', ...) to (0, 1, ..., 0', 1', ...)."""
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _translate(file: GGUFFile, naming: _Naming, config: Mapping[str, Any]) -> dict[str, _Source]:
    """Hugging Face name -> where it comes from. A tensor left over is an error, not dropped."""
    sources = _experts(file, naming, config)
    taken = {source.name for source in sources.values()}
    for name in file.tensors:
        # The first is already in the config, and factors are read with their weights.
        if name == ROPE_FREQS or name in taken or is_factor(name, file.tensors):
            continue
        place = _place(naming, name, config["num_hidden_layers"])
        if place is None:
            reason = f"no place for it in a {config['num_hidden_layers']}-layer {naming.hf_class}"
            raise bad_field(file.path, "tensor", name, reason, "the model may be a newer variant")
        hf_name, stem = place
        sources[hf_name] = _source_of(file, naming, name, stem, config)
    return sources


def _experts(file: GGUFFile, naming: _Naming, config: Mapping[str, Any]) -> dict[str, _Source]:
    """Each expert, in the tensors that hold all those of a layer."""
    sources: dict[str, _Source] = {}
    for layer in range(min(config["num_hidden_layers"], len(file.tensors))):
        for stem, theirs in naming.stacked.items():
            name = f"blk.{layer}.{stem}.weight"
            if name not in file.tensors:
                raise bad_field(file.path, "tensor", name, "missing from the file")
            shape, num_experts = file.tensors[name].shape, config["num_experts"]
            if len(shape) != 3 or shape[0] != num_experts:
                reason = f"want {num_experts} experts, three dimensions"
                raise bad_field(file.path, f"shape of {name!r}", shape, reason)
            for e in range(num_experts):
                hf_name = f"{naming.layer}{layer}.mlp.experts.{e}.{theirs}.weight"
                sources[hf_name] = _Source(name, expert=e)
    return sources


def _place(naming: _Naming, name: str, num_layers: int) -> tuple[str, str] | None:
    """Hugging Face name and GGUF stem, or None when the architecture has no such tensor."""
    if match := _IN_LAYER.fullmatch(name):
        layer, stem, kind = match.groups()
        known = naming.inner.get(stem) if int(layer) < num_layers else None
        return None if known is None else (f"{naming.layer}{layer}.{known}.{kind}", stem)
    if match := _OUTSIDE.fullmatch(name):
        stem, kind = match.groups()
        known = naming.outer.get(stem)
        return None if known is None else (f"{known}.{kind}", stem)
    return None


def _source_of(
    file: GGUFFile, naming: _Naming, name: str, stem: str, config: Mapping[str, Any]
) -> _Source:
    shape = file.tensors[name].shape
    if stem in naming.permuted:
        is_query = stem == "attn_q"
        heads = config["num_attention_heads" if is_query else "num_key_value_heads"]
        rows = heads * config["head_dim"]
        if not shape or shape[0] != rows or config["head_dim"] % 2:
            reason = f"want {rows} rows: {heads} heads of {config['head_dim']}, an even number"
            raise bad_field(file.path, f"shape of {name!r}", shape, reason)
        return _Source(name, rotary_heads=heads)
    if stem in naming.transposed and name.endswith(".weight"):
        if len(shape) != 2:
            raise bad_field(file.path, f"shape of {name!r}", shape, "want two dimensions")
        return _Source(name, is_transposed=True)
    if naming.norms_from_one and stem.endswith("norm"):
        return _Source(name, is_from_one=True)
    return _Source(name, is_row=stem == "ffn_gate_inp_shexp" and len(shape) == 1)


def _check_complete(file: GGUFFile, naming: _Naming, num_layers: int) -> None:
    if num_layers > len(file.tensors):  # before looping over a number the file made up
        reason = f"more layers than the {len(file.tensors)} tensors"
        raise bad_field(file.path, "block_count", num_layers, reason)
    per_layer = [f"{stem}.weight" for stem in (*naming.inner, *naming.stacked)]
    per_layer += [f"{stem}.bias" for stem in naming.inner if stem in naming.biases]
    wanted = [f"{stem}.weight" for stem in naming.outer if stem != "output"]
    wanted += [f"{stem}.bias" for stem in naming.outer if stem in naming.biases]
    wanted += [f"blk.{layer}.{stem}" for layer in range(num_layers) for stem in per_layer]
    if missing := [name for name in wanted if name not in file.tensors]:
        reason = f"missing from the file, with {len(missing) - 1} more"
        raise bad_field(file.path, "tensor", missing[0], reason)


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """The tensor that a Hugging Face one is stored in, and what is done to it: for writers."""

    name: str
    is_transposed: bool
    is_rotary: bool  # rows of each head are interleaved
    is_from_one: bool  # one is added
    expert: int | None


def gguf_names(hf_class: str, num_layers: int, num_experts: int) -> dict[str, GGUFTensor] | None:
    """Hugging Face name -> its tensor, for all that such a model may have; None: no GGUF
    architecture is known for it."""
    known = {naming.hf_class: naming for naming in (*_NAMINGS.values(), _MIXTRAL)}
    if (naming := known.get(hf_class)) is None:
        return None
    found = {
        f"{theirs}.{kind}": _gguf_tensor(naming, stem, f"{stem}.{kind}")
        for stem, theirs in naming.outer.items()
        for kind in ("weight", "bias")
    }
    for layer in range(num_layers):
        for stem, theirs in naming.inner.items():
            for kind in ("weight", "bias"):
                name = f"blk.{layer}.{stem}.{kind}"
                found[f"{naming.layer}{layer}.{theirs}.{kind}"] = _gguf_tensor(naming, stem, name)
        for stem, theirs in naming.stacked.items():
            for e in range(num_experts):
                own = replace(_gguf_tensor(naming, stem, f"blk.{layer}.{stem}.weight"), expert=e)
                found[f"{naming.layer}{layer}.mlp.experts.{e}.{theirs}.weight"] = own
    return found


def gguf_arch(hf_class: str) -> str:
    """`general.architecture` of a class that `gguf_names` knows."""
    archs = {naming.hf_class: arch for arch, naming in _NAMINGS.items()}
    return archs.get(hf_class, "llama")


def _gguf_tensor(naming: _Naming, stem: str, name: str) -> GGUFTensor:
    is_weight = name.endswith(".weight")
    return GGUFTensor(
        name,
        is_transposed=stem in naming.transposed and is_weight,
        is_rotary=stem in naming.permuted,
        is_from_one=naming.norms_from_one and stem.endswith("norm"),
        expert=None,
    )
