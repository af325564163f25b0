"""tiny_model: a whole model folder of any family, made on the spot with random weights.

Tensors carry the names and shapes of the family's own checkpoints, found by walking its name table
backwards over an empty decoder, so that whatever reads such checkpoints reads this folder too. For
tests, examples and benchmarks; the text it makes is noise. Configs are in `tiny_configs.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.models.names import Target
from quire.models.plan import empty_decoder
from quire.models.registry import names_of, spec_of
from quire.models.tiny_configs import tiny_config
from quire.nn.parameter import Parameter

# Large enough that logits differ clearly between tokens.
WEIGHT_STD, VECTOR_STD = 0.15, 0.1
NORM_RANGE = (0.5, 1.5)

SPECIAL = ("<s>", "</s>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_model(
    family: str, folder: str | Path, seed: int = 0, *, tokenizer: bool = True, **changes: Any
) -> Path:
    """Write config.json, model.safetensors and, unless told not to, a tokenizer of bytes.

    >>> tiny_model("qwen3", "/tmp/tiny-qwen3", num_hidden_layers=1)         # doctest: +SKIP
    """
    from safetensors.torch import save_file

    config = tiny_config(family, **changes)
    made = write_config(config, folder, tokenizer=tokenizer)
    save_file(random_tensors(config, seed), made / "model.safetensors", metadata={"format": "pt"})
    return made


def write_config(config: Mapping[str, Any], folder: str | Path, *, tokenizer: bool = True) -> Path:
    """A folder without weights, for load_format="dummy"."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if tokenizer:
        write_byte_tokenizer(folder)
    return folder


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of such a model by its checkpoint name, in fp32."""
    spec = spec_of(config)
    parameters = empty_decoder(spec).parameters()
    generator = torch.Generator().manual_seed(seed)
    names = {t: at for t, at in names_of(config, spec).items() if _is_of(config, t)}
    tensors: dict[str, Tensor] = {}
    for theirs, target in _stored(names, parameters).items():
        parameter = parameters[target.name]
        shape = parameter.shape_of(target.part)
        tensor = torch.empty(shape[::-1] if target.transposed else shape)
        _fill(tensor, target.name, spec.norm_offset, generator)
        tensors[theirs] = tensor
    pack = _PACKERS.get(str(config.get("model_type")))
    return tensors if pack is None else pack(tensors)


def _is_of(config: Mapping[str, Any], theirs: str) -> bool:
    """Whether a name is one that checkpoints with this very config use, where a table has more."""
    if config.get("q_lora_rank") and ".q_proj." in theirs:
        return False  # a squeezed query has names of its own
    return "text_config" not in config or theirs.startswith("language_model.")


def _stored(names: Mapping[str, Target], parameters: Mapping[str, Parameter]) -> dict[str, Target]:
    """The names that fill each parameter once: the first in the table, where it knows several."""
    missing = {(name, part) for name, p in parameters.items() for part in (p.parts or (None,))}
    chosen: dict[str, Target] = {}
    for theirs, target in names.items():
        if target.name not in parameters:
            continue  # of another version of the family
        parts = parameters[target.name].parts
        fills = {(target.name, part) for part in parts or (None,)}
        if target.part is not None:
            fills = {(target.name, target.part)}
        if fills <= missing:
            chosen[theirs] = target
            missing -= fills
    if missing:
        name, part = min(missing, key=str)
        raise CheckpointError(
            f"the name table has no line for {name}{f':{part}' if part else ''}; add one"
        )
    return chosen


def _fill(tensor: Tensor, name: str, norm_offset: float, generator: torch.Generator) -> None:
    if "norm" in name and name.endswith(".weight"):
        low, high = NORM_RANGE
        tensor.uniform_(low - norm_offset, high - norm_offset, generator=generator)
    else:
        tensor.normal_(0.0, WEIGHT_STD if tensor.ndim > 1 else VECTOR_STD, generator=generator)


def _join_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """gpt-oss stores a layer's experts in one tensor, gate and up interleaved, outputs last."""
    joined = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}  # layer -> (expert, projection) -> it
    for name in tensors.keys() - joined.keys():
        layer, _, rest = name.partition(".experts.")
        expert, _, projection = rest.partition(".")
        experts.setdefault(layer, {})[int(expert), projection] = tensors[name]
    for layer, found in experts.items():
        count = 1 + max(expert for expert, _ in found)
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            gates, ups, downs = (
                torch.stack([found[e, f"{name}_proj.{kind}"] for e in range(count)])
                for name in ("gate", "up", "down")
            )
            both = torch.stack([gates, ups], dim=2).flatten(1, 2)  # [experts, 2 * ffn, ...]
            for name, whole in (("gate_up_proj", both), ("down_proj", downs)):
                stored = whole.transpose(1, 2).contiguous() if kind == "weight" else whole
                joined[f"{layer}.experts.{name}{suffix}"] = stored
    return joined


# model_type -> how its checkpoints hold what the name table calls by plain names
_PACKERS: Mapping[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "gpt_oss": _join_experts
}


def write_byte_tokenizer(folder: Path) -> None:
    """A token for every byte, and a begin and an end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: id for id, token in enumerate((*SPECIAL, *letters))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    made.save(str(folder / "tokenizer.json"))
    begin, end = SPECIAL
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(words), encoding="utf-8")
