"""Arguments of `LLM`: our own, vLLM's other names for them, and vLLM's that have no place here.

The last kind is accepted at values that change nothing, so that scripts run as they are. Any other
value is refused by name, with the reason and the way out. Nothing is ignored silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config import EngineArgs
from quire.errors import NotSupported
from quire.flat_args import arg_names, args_of
from quire.speculative import parse_speculative

# vLLM's name -> field of EngineArgs
RENAMED = {"block_size": "page_size", "kv_cache_memory_bytes": "kv_cache_memory"}

# of vLLM's eplb_config -> field of EngineArgs; None: nothing to decide
EPLB = {
    "num_redundant_experts": "num_redundant_experts",
    "step_interval": "eplb_step_interval",
    "log_balancedness": None,
}


@dataclass(frozen=True, slots=True)
class Unneeded:
    """An argument with nothing to decide here."""

    harmless: tuple[object, ...] | None  # values that change nothing; None: all of them
    otherwise: str = ""  # why the others cannot be had, and what to do


ONE_DEVICE = "one device runs the whole model; start one engine for each device"
TASKS = (None, "auto", "generate", "embed", "embedding", "classify", "score", "reward")

UNNEEDED = {
    "distributed_executor_backend": Unneeded((None,), ONE_DEVICE),
    "disable_custom_all_reduce": Unneeded(None),
    "enable_expert_parallel": Unneeded(None),  # ranks that share a layer have whole experts
    "enable_eplb": Unneeded(None),  # as soon as there are redundant experts
    "calculate_kv_scales": Unneeded(
        (False, None), "kv_cache_dtype='fp8_per_token_head' has a scale for every row of its own"
    ),
    "cpu_offload_gb": Unneeded(
        (0,), "all weights stay on the device; choose a smaller or a quantized model"
    ),
    "swap_space": Unneeded(None),  # a request that loses its pages computes them anew
    "max_seq_len_to_capture": Unneeded(None),  # graphs are captured by batch, not by length
    "enable_lora": Unneeded(None),  # adapters are read when a request names one
    "max_lora_rank": Unneeded(None),  # ranks are what folders have
    "lora_dtype": Unneeded(("auto", None), "A and B are kept as stored, and multiplied in fp32"),
    "fully_sharded_loras": Unneeded((False, None), ONE_DEVICE),
    "task": Unneeded(
        TASKS, "models of text generate, embed, classify and score; call what you need"
    ),
    "runner": Unneeded(("auto", "generate", "pooling"), "models of text generate or pool"),
    "convert": Unneeded(("auto", "none", "embed"), "any model embeds; heads come with the model"),
    "download_dir": Unneeded((None,), "set the environment variable QUIRE_CACHE to that folder"),
    "revision": Unneeded((None,), "write the model as 'name@revision'"),
    "tokenizer_revision": Unneeded((None,), "write the tokenizer as 'name@revision'"),
    "tokenizer_mode": Unneeded(("auto", "slow"), "tokenizer.json or the GGUF file is what is read"),
    # A permission, and nobody here makes use of it: code in a model's folder is never run.
    "trust_remote_code": Unneeded(None),
    "hf_token": Unneeded((None,), "set the environment variable HF_TOKEN"),
    "hf_overrides": Unneeded((None, {}), "change config.json in a copy of the model's folder"),
    "disable_log_stats": Unneeded(None),
}


def engine_args(model: str, given: Mapping[str, Any]) -> EngineArgs:
    """Raises NotSupported for what is unknown or cannot be done."""
    known = arg_names() - {"model"}
    values: dict[str, Any] = {}
    unknown = []
    for name, value in _spread_eplb(given).items():
        if name in UNNEEDED:
            _check_unneeded(name, value)
        elif (own := RENAMED.get(name, name)) not in known:
            unknown.append(name)
        elif own != name and given.get(own) is not None:
            raise NotSupported(f"got {name} and {own}, which mean the same; give one of them")
        elif value is not None or own == "seed":  # None: as if not said; of seeds: fresh draws
            values[own] = tuple(value) if isinstance(value, list) else value
    if unknown:
        raise NotSupported(_unknown(unknown, known))
    if "speculative_config" in values:  # before anything is downloaded
        parse_speculative(values["speculative_config"])
    return args_of({"model": model, **values})


def _spread_eplb(given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's record about redundant experts, as fields of ours. They are always logged."""
    spread = {name: value for name, value in given.items() if name != "eplb_config"}
    for name, value in (given.get("eplb_config") or {}).items():
        if name not in EPLB:
            known = ", ".join(EPLB)
            raise NotSupported(f"got eplb_config={{{name!r}: {value!r}}}, known: {known}")
        if EPLB[name] is not None:
            spread.setdefault(EPLB[name] or "", value)
    return spread


def _check_unneeded(name: str, value: object) -> None:
    harmless = UNNEEDED[name].harmless
    if harmless is None or value in harmless:
        return
    want = " or ".join(repr(one) for one in harmless)
    raise NotSupported(f"got {name}={value!r}, want {want}: {UNNEEDED[name].otherwise}")


def _unknown(names: list[str], known: set[str]) -> str:
    takes = {*known, *RENAMED, *UNNEEDED}
    near = {name: difflib.get_close_matches(name, takes, n=1) for name in sorted(names)}
    hints = ", ".join(
        f"{name!r} (did you mean {found[0]!r}?)" if found else f"{name!r}"
        for name, found in near.items()
    )
    return f"unknown LLM argument {hints}; known: {', '.join(sorted(known))}"
