"""The made parts of docs/models.md: what the registry knows, and what is refused in which words.

python -m quire.models.families_doc docs/models.md

Rows are read off the specs of tiny members (`tiny_configs.py`), sentences are the first of each
family's file, refusals are asked for and their answers written down. What people wrote around
the marked stretches stays.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import CheckpointError, NotSupported
from quire.models.registry import FAMILIES, spec_of
from quire.models.spec import ModelSpec, MoeSpec
from quire.models.tiny_configs import tiny_config

# What a config has to say where a family has windows in some versions only.
WINDOW: Mapping[str, Any] = {
    "sliding_window": 20,
    "use_sliding_window": True,
    "max_window_layers": 1,
}
ACTIVATIONS = {"silu": "SiLU", "gelu": "GELU", "relu2": "squared ReLU"}


class Refusal(NamedTuple):
    """A config that is turned away: a member of a family with these changes."""

    family: str
    changes: Mapping[str, Any]


REFUSALS = (
    Refusal("llama", {"hidden_act": "gelu"}),
    Refusal("llama", {"rope_scaling": {"rope_type": "mrope"}}),
    Refusal("gemma3_text", {"use_bidirectional_attention": True}),
    Refusal("gpt_oss", {"layer_types": ["chunked_attention"] * 2}),
    Refusal("qwen3", {"quantization_config": {"quant_method": "torchao"}}),
    Refusal("deepseek_v2", {"norm_topk_prob": True}),
    Refusal("deepseek_v2", {"attention_bias": True}),
)


def families_table() -> str:
    rows = ["| architecture | attention | feed-forward | norms |", "|---|---|---|---|"]
    for name in FAMILIES.entries:
        config = tiny_config(name)
        spec = spec_of(config)
        cells = (f"`{name}`", _attention(spec, config), _feed_forward(spec), _norms(spec))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def families_list() -> str:
    """A line a file: its first sentence, which says what is special about the family."""
    files: dict[str, None] = dict.fromkeys(FAMILIES.entries.values())
    lines = []
    for module in files:
        path = module.replace(".", "/") + ".py"
        sentence = _first_sentence(importlib.import_module(module).__doc__ or "")
        lines.append(f"- [`{module.rpartition('.')[2]}`](../{path}): {sentence}")
    return "\n".join(lines)


def refusals_table() -> str:
    rows = ["| `config.json` | answer |", "|---|---|"]
    for family, changes in REFUSALS:
        said = ", ".join(f"`{key}: {json.dumps(value)}`" for key, value in changes.items())
        rows.append(f"| {family}: {said} | {answer(family, changes)} |")
    return "\n".join(rows)


def answer(family: str, changes: Mapping[str, Any]) -> str:
    try:
        spec_of(tiny_config(family, **changes))
    except (CheckpointError, NotSupported) as error:
        return str(error).replace("|", r"\|")
    raise AssertionError(f"{family} with {dict(changes)} is not refused any more")


PARTS = {
    "architectures": families_table,
    "families": families_list,
    "refusals": refusals_table,
}


def with_parts(page: str) -> str:
    """The page with its made stretches as they should be."""
    for name, make in PARTS.items():
        begin, end = f"<!-- {name}: made -->\n", f"\n<!-- {name}: end -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        assert found and closed, f"the page has no stretch between {begin!r} and {end!r}"
        page = before + begin + make() + end + after
    return page


# ------------------------------------------------------------ words


def _attention(spec: ModelSpec, config: Mapping[str, Any]) -> str:
    if spec.mla is not None:
        squeezed = "" if spec.mla.q_rank is None else ", queries squeezed"
        return f"latent{squeezed}"
    parts = [_reach(spec, config)]
    if spec.qkv_bias:
        parts.append("biases")
    if spec.qk_norm != "none":
        parts.append("q and k normed " + ("by head" if spec.qk_norm == "head" else "as a whole"))
    if spec.attn_softcap is not None:
        parts.append("capped logits")
    if spec.sinks:
        parts.append("sinks")
    if spec.rope is None:
        parts.append("learned positions")
    if spec.local_rope is not None:
        parts.append("another rotation in windows")
    return ", ".join(parts)


def _reach(spec: ModelSpec, config: Mapping[str, Any]) -> str:
    if spec.windows:
        return "full and windowed layers"
    if spec_of({**config, **WINDOW}).windows:
        return "full, or windowed where the config says so"
    return "full"


def _feed_forward(spec: ModelSpec) -> str:
    if spec.moe is not None:
        return _experts(spec.moe)
    if spec.mlp == "plain":
        return "plain, GELU"
    return f"gated by {ACTIVATIONS[spec.activation]}"


def _experts(moe: MoeSpec) -> str:
    router = moe.router
    parts = [f"experts by {router.score}"]
    if router.num_groups > 1:
        parts.append("within the best groups")
    if router.correction:
        parts.append("corrected by learned numbers")
    if moe.swiglu_limit is not None:
        parts.append("clamped gates")
    if moe.expert_bias:
        parts.append("biases")
    if moe.shared_ffn_size:
        parts.append("a shared one" + (" behind a gate" if moe.has_shared_gate else ""))
    if moe.dense_layers:
        parts.append("dense layers first")
    return ", ".join(parts)


def _norms(spec: ModelSpec) -> str:
    where = "before blocks"
    if spec.norm_after:
        where = "after blocks"
    if spec.norm_both:
        where = "before and after blocks"
    if spec.sub_norms:
        where = "before blocks and inside them"
    kind = "LayerNorm" if spec.norm == "layer" else "RMS"
    return f"{kind} {where}" + (", weights from one" if spec.norm_offset else "")


def _first_sentence(text: str) -> str:
    one_line = " ".join(text.split())
    return re.split(r"(?<=\.) (?=[A-Z])", one_line, maxsplit=1)[0]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_parts(target.read_text(encoding="utf-8")), encoding="utf-8")
