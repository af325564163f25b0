"""quire inspect: what a model is and what the engine would decide for it. Loads no weights.

Pages that fit are an estimate here: the real count comes after the weights are in and, on a GPU,
after the largest step has run (`engine/build.py`).
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire.cli.engine_flags import add_engine_flags, add_model, engine_args
from quire.cli.parser import VerbParser
from quire.cli.pull import file_bytes
from quire.cli.show import print_json, print_table
from quire.errors import CheckpointError, OutOfMemory

if TYPE_CHECKING:
    import torch

    from quire.config import Decision, EngineArgs, EngineConfig
    from quire.load.open import OpenModel
    from quire.models.spec import ModelSpec
    from quire.text.tokenizer import Tokenizer

EXAMPLES = """
quire inspect
quire inspect qwen2.5-coder-0.5b-instruct --max-model-len 4096
quire inspect ./model-folder --kv-cache-memory 512MiB --json
"""


def build_parser() -> VerbParser:
    purpose = "Show a model's sizes and the engine's decisions, without loading weights."
    parser = VerbParser("inspect", purpose, EXAMPLES, "[MODEL]")
    add_model(parser)
    parser.flag("--json", "one JSON object", action="store_true")
    add_engine_flags(parser)
    return parser


@dataclass(frozen=True, slots=True)
class Fact:
    what: str
    value: object
    note: str = ""


def run(args: Namespace) -> int:
    facts, decisions = inspect(engine_args(args))
    if args.json:
        print_json(
            {
                "model": {fact.what: fact.value for fact in facts},
                "decisions": [{"what": d.what, "value": d.value, "why": d.why} for d in decisions],
            }
        )
        return 0
    print_table(("model", "", ""), [(f.what, _shown(f.value), f.note) for f in facts])
    print()
    print_table(("decision", "", "why"), [(d.what, d.value, d.why) for d in decisions])
    return 0


def inspect(args: EngineArgs) -> tuple[list[Fact], list[Decision]]:
    from quire.models.registry import spec_of
    from quire.resolve import resolve

    opened = _open(args)
    spec = spec_of(opened.checkpoint.config)
    config, device, dtype = resolve(args, spec)
    facts = [*_model_facts(spec, opened), *_tokenizer_facts(opened.tokenizer)]
    facts += _memory_facts(spec, config, dtype)
    return facts, [*config.decisions, _cache_decision(spec, config, device, dtype)]


def _open(args: EngineArgs) -> OpenModel:
    """With its tokenizer, or without one where none can be read."""
    from quire.load.open import open_model

    try:
        return open_model(args)
    except CheckpointError:
        return open_model(replace(args, skip_tokenizer_init=True))


def _model_facts(spec: ModelSpec, opened: OpenModel) -> list[Fact]:
    rope = spec.rope
    positions = "learned" if rope is None else f"rotary, {rope.kind}, theta {rope.theta:g}"
    return [
        Fact("path", str(opened.path)),
        Fact("file size", file_bytes(opened.path), "bytes"),
        Fact("architecture", spec.architecture),
        Fact("parameters", spec.num_params, f"{spec.num_params / 1e6:.1f} M, norms left out"),
        *_expert_facts(spec),
        Fact("layers", spec.num_layers),
        Fact("hidden size", spec.hidden_size, f"feed-forward {spec.ffn_size}, {spec.mlp}"),
        Fact("heads", spec.num_heads, f"of {spec.head_dim} dimensions"),
        Fact(
            "kv heads", spec.num_kv_heads, f"{spec.num_heads // spec.num_kv_heads} heads share one"
        ),
        Fact("positions", positions, f"up to {spec.max_positions}"),
        Fact("vocabulary", spec.vocab_size, "output head tied to it" if spec.tied else ""),
        Fact("stored dtype", spec.dtype),
    ]


def _expert_facts(spec: ModelSpec) -> list[Fact]:
    if spec.moe is None:
        return []
    router, active = spec.moe.router, spec.num_active_params
    sparse = sum(spec.is_sparse(layer) for layer in range(spec.num_layers))
    shared = f", shared {spec.moe.shared_ffn_size}" if spec.moe.shared_ffn_size else ""
    return [
        Fact("active parameters", active, f"{active / 1e6:.1f} M, what one token meets"),
        Fact(
            "experts",
            router.num_experts,
            f"{router.top_k} per token in {sparse} layers, each of {spec.moe.ffn_size}{shared}",
        ),
    ]


def _tokenizer_facts(tokenizer: Tokenizer | None) -> list[Fact]:
    if tokenizer is None:
        return [Fact("tokenizer", "none", "only token ids can be used")]
    has_template = tokenizer.chat_template is not None
    ends = ", ".join(f"{id} {tokenizer.id_to_token(id)!r}" for id in tokenizer.eos_ids)
    return [
        Fact("tokenizer", tokenizer.vocab_size, "tokens"),
        Fact("begins with", str(tokenizer.bos_token), f"id {tokenizer.bos_token_id}"),
        Fact("ends with", ends or "nothing"),
        Fact("chat template", "yes" if has_template else "no"),
    ]


def _memory_facts(spec: ModelSpec, config: EngineConfig, dtype: torch.dtype) -> list[Fact]:
    page = _page_bytes(spec, config, dtype)
    size = config.cache.page_size
    weights = spec.num_params * dtype.itemsize
    return [
        Fact("weights in memory", weights, f"bytes, {weights / 2**20:.0f} MiB as {config.dtype}"),
        Fact("kv bytes per token", page // size, f"2 x {spec.num_layers} layers x heads x dims"),
        Fact("kv bytes per page", page, f"{size} tokens"),
        Fact(
            "kv bytes per full request",
            page * -(-config.sched.max_model_len // size),
            f"{config.sched.max_model_len} tokens",
        ),
    ]


def _page_bytes(spec: ModelSpec, config: EngineConfig, dtype: torch.dtype) -> int:
    from quire.attn.backend import AttnSpec
    from quire.memory.pool import bytes_per_page

    scale = spec.head_dim**-0.5
    heads = AttnSpec(
        spec.num_heads, spec.num_kv_heads, spec.head_dim, scale, config.cache.page_size
    )
    return bytes_per_page(heads, spec.num_layers, dtype)


def _cache_decision(
    spec: ModelSpec, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> Decision:
    from quire.config import Decision
    from quire.memory.sizing import Room, cpu_cache_bytes, num_pages
    from quire.runner.device import free_memory, total_memory

    free, weights = free_memory(device), spec.num_params * dtype.itemsize
    size, sched = config.cache.page_size, config.sched
    page = _page_bytes(spec, config, dtype)
    if device.type == "cuda":
        used = total_memory(device) - free
        usable = int(total_memory(device) * config.gpu_memory_utilization) - used
        room = Room(total_memory(device), usable, weights, 0, config.kv_cache_memory)
    else:
        one_request = (-(-sched.max_model_len // size) + 1) * page
        usable = cpu_cache_bytes(free - weights, one_request)
        room = Room(total_memory(device), usable, 0, 0, config.kv_cache_memory)
    try:
        pages = num_pages(room, page, size, sched.max_model_len, sched.max_num_seqs) - 1
    except OutOfMemory as error:
        return Decision("kv cache", "does not fit", str(error))
    value = f"about {pages} pages of {size} = {pages * size} tokens"
    return Decision("kv cache", value, room.describe())


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
