"""quire inspect: what a model is and what the engine would decide for it. Loads no weights, but
reads one of each form and shape that is stored packed.

Pages that fit, and what each of several ranks has, are estimates of `room_plan.py`.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire.cli.engine_flags import add_engine_flags, add_model, engine_args
from quire.cli.parser import VerbParser, positive
from quire.cli.show import print_json, print_table
from quire.errors import BadRequest

if TYPE_CHECKING:
    import torch

    from quire.cli.layer_plan import Bandwidth, DecodeRate
    from quire.cli.weight_forms import Held, PartForms
    from quire.config import Decision, EngineArgs, EngineConfig
    from quire.engine.cpu_path import CpuPath
    from quire.kv.groups import PageNeeds
    from quire.load.open import OpenModel
    from quire.models.plan import ModelPlan
    from quire.models.spec import ModelSpec
    from quire.text.tokenizer import Tokenizer

EXAMPLES = """
quire inspect
quire inspect qwen2.5-coder-0.5b-instruct --context 4096
quire inspect ./model-folder --kv-cache-memory 512MiB --json
"""


def build_parser() -> VerbParser:
    purpose = "Show a model layer by layer and the engine's decisions, without loading weights."
    parser = VerbParser("inspect", purpose, EXAMPLES, "[MODEL]")
    add_model(parser)
    parser.flag("--context", "tokens of the request asked about", type=positive, metavar="N")
    parser.flag("--json", "one JSON object", action="store_true")
    add_engine_flags(parser)
    return parser


@dataclass(frozen=True, slots=True)
class Fact:
    what: str
    value: object
    note: str = ""


@dataclass(frozen=True, slots=True)
class Inspection:
    facts: list[Fact]
    context: int
    plan: ModelPlan
    forms: list[PartForms]
    bandwidth: Bandwidth
    rates: list[DecodeRate]
    decisions: list[Decision]


def run(args: Namespace) -> int:
    found = inspect(engine_args(args), args.context)
    if args.json:
        print_json(_record(found))
    else:
        _print_tables(found)
    return 0


def inspect(args: EngineArgs, context: int | None = None) -> Inspection:
    """`context` is the length of the request whose pages are counted; None: the longest one."""
    import torch

    from quire.cli.layer_plan import bandwidth_of, decode_rates
    from quire.cli.room_plan import Wanted, room_decisions
    from quire.cli.weight_forms import PLAIN, by_part, step_weights
    from quire.engine.cache_form import cache_decisions, cache_wish, plain_form
    from quire.engine.cpu_path import CpuPath
    from quire.engine.rank_places import threads_shared
    from quire.engine.tier_parts import planned_tiers
    from quire.load.fit import check_fit
    from quire.models.kv_cache import cache_of
    from quire.models.plan import plan_of
    from quire.models.registry import spec_of
    from quire.resolve import resolve

    opened = _open(args)
    spec = spec_of(opened.checkpoint.config)
    check_fit(opened.checkpoint, spec, opened.tokenizer)
    config, device, dtype = resolve(args, spec)
    longest = config.sched.max_model_len
    if context is not None and context > longest:
        raise BadRequest(f"got --context {context}, want at most max_model_len={longest}")
    args = threads_shared(args)
    cpu = CpuPath.of(args, device)
    held, keeps = _held(args, opened, spec, cpu, (device, dtype))
    has_codes = cpu.keeps_packed and any(one.form.partition(",")[0] not in PLAIN for one in held)
    plain = plain_form(torch.float16 if has_codes else dtype)
    kept = cache_wish(args, config.cache, opened.checkpoint, spec)
    wanted = Wanted(args, config, spec, device, plain, kept)
    needs = wanted.needs()
    cache = cache_of(spec, plain, kept, config.cache.page_size)
    plan = plan_of(spec, cache, context or longest, needs)
    facts = [*_model_facts(spec, opened, plan), *_tokenizer_facts(opened.tokenizer)]
    facts += _sampling_facts(args.model, opened)
    weights = sum(one.num_bytes for one in held)
    facts += _memory_facts(config, plan, needs, held, keeps)
    bandwidth, step = bandwidth_of(device), step_weights(held, spec.tied)
    rates = decode_rates(spec, context or longest, step, cache, bandwidth)
    decisions = [*config.decisions, *cpu.kernel_decisions(), *cache_decisions(cache)]
    decisions += [*_pack_decisions(args, opened, cpu, device), *planned_tiers(args, cache)]
    decisions += room_decisions(wanted, weights)
    forms = by_part(held)
    return Inspection(facts, context or longest, plan, forms, bandwidth, rates, decisions)


# ------------------------------------------------------------ printing


def _record(found: Inspection) -> dict[str, object]:
    plan = found.plan
    return {
        "model": {fact.what: fact.value for fact in found.facts},
        "layers": [
            {"layers": r.layers, "attention": r.attention, "feed_forward": r.feed_forward}
            for r in plan.runs
        ],
        "weights": [
            {"where": f.where, "forms": f.forms, "bytes": f.num_bytes} for f in found.forms
        ],
        "cache": {
            "token_bytes": plan.token_bytes,
            "expanded_token_bytes": plan.expanded_token_bytes,
            "page_bytes": plan.page_bytes,
            "context": found.context,
            "pages": plan.num_pages,
            "groups": [
                {
                    "layers": list(g.layers),
                    "window": g.window,
                    "token_bytes": g.token_bytes,
                    "pages": g.num_pages,
                }
                for g in plan.groups
            ],
        },
        "decode_bound": {
            "bytes_per_s": round(found.bandwidth.bytes_per_s),
            "source": found.bandwidth.source,
            "rates": [
                {
                    "batch": r.batch,
                    "step_bytes": r.step_bytes,
                    "tokens_per_s": round(r.tokens_per_s, 1),
                }
                for r in found.rates
            ],
        },
        "decisions": [{"what": d.what, "value": d.value, "why": d.why} for d in found.decisions],
    }


def _print_tables(found: Inspection) -> None:
    plan = found.plan
    print_table(("model", "", ""), [(f.what, _shown(f.value), f.note) for f in found.facts])
    print()
    rows = [(run.layers, run.attention, run.feed_forward) for run in plan.runs]
    print_table(("layers", "attention", "feed-forward"), rows)
    print()
    forms = [(f.where, ", ".join(f.forms), f"{f.num_bytes:,}") for f in found.forms]
    print_table(("weights of", "form", "bytes"), forms)
    print()
    groups: list[tuple[object, ...]] = [
        (_ranges(g.layers), g.window or "all", f"{g.token_bytes:,}", f"{g.num_pages:,}")
        for g in plan.groups
    ]
    groups.append(("together", "", f"{plan.token_bytes:,}", f"{plan.num_pages:,}"))
    pages = f"pages at {found.context:,} tokens"
    print_table(("cache of layers", "sees", "bytes per token", pages), groups)
    print()
    gigabytes = found.bandwidth.bytes_per_s / 1e9
    print_table(
        ("decode at batch", "bytes a step", "tokens/s at most", "bound"),
        [
            (
                r.batch,
                f"{r.step_bytes:,}",
                f"{r.tokens_per_s:,.1f}",
                f"{gigabytes:,.0f} GB/s, {found.bandwidth.source}",
            )
            for r in found.rates
        ],
    )
    print()
    print_table(("decision", "", "why"), [(d.what, d.value, d.why) for d in found.decisions])


def _ranges(layers: tuple[int, ...]) -> str:
    """0-3, 7"""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][1] == layer - 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


# ------------------------------------------------------------ facts


def _open(args: EngineArgs) -> OpenModel:
    """With its tokenizer, or without one where there is none."""
    from quire.load.open import has_tokenizer, open_model

    return open_model(replace(args, skip_tokenizer_init=not has_tokenizer(args)))


On = tuple["torch.device", "torch.dtype"]


def _held(
    args: EngineArgs, opened: OpenModel, spec: ModelSpec, cpu: CpuPath, on: On
) -> tuple[list[Held], bool]:
    """The weights as they will be in memory, and whether that is as they are stored."""
    from quire.cli.stored_forms import StoredForms
    from quire.cli.weight_forms import made_forms
    from quire.engine.gpu_weights import keeps_packed_on
    from quire.quant.form_name import is_form
    from quire.quant.load_forms import load_form
    from quire.quant.methods import method_of, stored_method

    device, dtype = on
    keeps_packed = cpu.keeps_packed or keeps_packed_on(device, args, opened.checkpoint)
    can_round = cpu.library is not None or device.type == "cuda"
    method = method_of(opened.checkpoint.config)
    name = args.quantization or ""
    rounds = is_form(name) and (method is None or stored_method(name) != method)
    if keeps_packed and not rounds and opened.checkpoint.names():
        return StoredForms(opened.checkpoint, method, device, dtype).held(), True
    form = load_form(name) if rounds and can_round else None  # else expanded again
    return made_forms(spec, dtype, form, name), False


def _model_facts(spec: ModelSpec, opened: OpenModel, plan: ModelPlan) -> list[Fact]:
    from quire.load.hub import file_bytes

    rope, total = spec.rope, plan.weights.total
    positions = "learned" if rope is None else f"rotary, {rope.kind}, theta {rope.theta:g}"
    return [
        Fact("path", str(opened.path)),
        Fact("file size", file_bytes(opened.path), "bytes"),
        Fact("architecture", spec.architecture),
        Fact("parameters", total, f"{total / 1e6:.1f} M"),
        *_expert_facts(spec, plan),
        Fact("layers", spec.num_layers),
        Fact("hidden size", spec.hidden_size, f"feed-forward {spec.ffn_size}, {spec.mlp}"),
        Fact("heads", spec.num_heads, f"of {spec.head_dim} dimensions"),
        _kv_fact(spec),
        Fact("positions", positions, f"up to {spec.max_positions}"),
        Fact("vocabulary", spec.vocab_size, "output head tied to it" if spec.tied else ""),
        *([Fact("labels", spec.num_labels, "it classifies")] if spec.num_labels else []),
        Fact("stored dtype", spec.dtype),
    ]


def _kv_fact(spec: ModelSpec) -> Fact:
    if spec.mla is not None:
        return Fact("kv heads", 1, f"latent of {spec.mla.kv_rank}, rotated {spec.mla.rope_dim}")
    shared = spec.num_heads // spec.num_kv_heads
    return Fact("kv heads", spec.num_kv_heads, f"{shared} heads share one")


def _expert_facts(spec: ModelSpec, plan: ModelPlan) -> list[Fact]:
    if spec.moe is None:
        return []
    router, active = spec.moe.router, plan.weights.active
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


def _sampling_facts(model: str, opened: OpenModel) -> list[Fact]:
    from quire.load.recommended import recommended_sampling

    found = recommended_sampling(model, opened.path)
    text = ", ".join(f"{name} {value:g}" for name, value in found.items())
    return [Fact("sampling", text, "its makers recommend it")] if text else []


def _memory_facts(
    config: EngineConfig,
    plan: ModelPlan,
    needs: PageNeeds,
    held: list[Held],
    is_stored: bool,
) -> list[Fact]:
    from quire.cli.weight_forms import totals
    from quire.memory.sizing import size_text

    size, longest = config.cache.page_size, config.sched.max_model_len
    sizes = totals(held)
    weights, form = sum(sizes.values()), f"as {config.dtype}"
    if is_stored or len(sizes) > 1:
        parts = ", ".join(f"{form} {size_text(size)}" for form, size in sizes.items())
        form = f"as kept: {parts}" if is_stored else f"rounded: {parts}"
    less = plan.expanded_token_bytes / plan.token_bytes
    whole = f"keys and values of every head would take {plan.expanded_token_bytes:,}"
    return [
        Fact("weights in memory", weights, f"bytes, {size_text(weights)} {form}"),
        Fact(
            "kv bytes per token",
            plan.token_bytes,
            f"{whole}, {less:.3g} times as much" if less > 1 else "",
        ),
        Fact("kv bytes per page", plan.page_bytes, f"{size} tokens of a group of layers"),
        Fact(
            "kv bytes per full request",
            plan.page_bytes * needs.of(longest),
            f"{longest} tokens",
        ),
    ]


def _pack_decisions(
    args: EngineArgs, opened: OpenModel, cpu: CpuPath, device: torch.device
) -> list[Decision]:
    from quire.config import Decision
    from quire.engine.build import asked_form
    from quire.engine.pack_identity import packs_of
    from quire.load.wish import Wish

    wish = Wish(cpu.keeps_packed, asked_form(args, opened.checkpoint, device))
    packs = None if cpu.library is None else packs_of(opened.checkpoint, wish)
    if packs is None:
        return []
    if packs.is_found:
        return [Decision("packed weights", "mapped", str(packs.path))]
    return [Decision("packed weights", "packed at the start", "no pack in the cache folder")]


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
