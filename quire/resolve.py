"""resolve: EngineArgs + checkpoint + device -> EngineConfig, every choice recorded with its reason.

The only place that turns what users say into what the engine does. Memory-dependent choices
(number of pages) come later, in `memory/sizing.py`, because they need the model to have run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.args_check import check_args
from quire.config import CacheConfig, Decision, EngineArgs, EngineConfig, SchedConfig
from quire.dist.devices import places_of
from quire.errors import NotSupported
from quire.kv.forms import parse_cache_dtype
from quire.kv.spec import skipped_layers
from quire.models.spec import ModelSpec
from quire.speculative import parse_speculative

if TYPE_CHECKING:
    import torch

CPU_SEQS, CUDA_SEQS, LARGE_CUDA_SEQS = 32, 256, 512
LARGE_CUDA = 64 << 30  # bytes: cards whose cache holds that many requests of usual length
CPU_TOKENS, CUDA_TOKENS = 512, 8192
DEFAULT_CPU_LEN = 8192
SERVED_GAP_MS = 50.0  # between tokens of a stream while others bring prompts


def target_gap(args: EngineArgs, device: torch.device) -> float:
    """A server on a GPU keeps steps short while others decode. On a CPU prompts are read in small
    steps anyway, and measuring what they take would be a good part of its start. On ranks and with
    drafts the measuring has not run on GPUs yet."""
    if args.target_gap_ms is not None:
        return args.target_gap_ms
    is_plain = args.parallel.num_ranks == 1 and args.speculative_config is None
    may = device.type == "cuda" and args.enable_chunked_prefill and is_plain
    return SERVED_GAP_MS if may else 0.0


def resolve(args: EngineArgs, spec: ModelSpec) -> tuple[EngineConfig, torch.device, torch.dtype]:
    from quire.runner.device import pick_device, pick_dtype

    check_args(args)
    decisions: list[Decision] = []

    def decide(what: str, value: object, why: str) -> None:
        decisions.append(Decision(what, str(value), why))

    device, why = pick_device(args.device)
    decide("device", device.type, why)
    _check_ranks(args, spec, device.type)
    if device.type == "cuda":
        _check_gpus(args)
    dtype, why = pick_dtype(args.dtype, spec.dtype, device)
    decide("dtype", str(dtype).removeprefix("torch."), why)
    max_len = _max_model_len(args, spec, device.type, decide)
    seqs, why = _max_num_seqs(args, device)
    decide("max_num_seqs", seqs, why)
    tokens = _default(
        args.max_num_batched_tokens, CPU_TOKENS if device.type == "cpu" else CUDA_TOKENS
    )
    if not args.enable_chunked_prefill and tokens < max_len:
        tokens = max_len
        why = "prompts must fit a step whole without chunked prefill"
    elif tokens < seqs:
        tokens, why = seqs, "one token for every sequence"
    else:
        why = "asked for" if args.max_num_batched_tokens else f"default on {device.type}"
    decide("max_num_batched_tokens", tokens, why)
    config = EngineConfig(
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        sched=SchedConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_model_len=max_len,
            max_chunk=args.max_chunk,
            policy=args.scheduling_policy,
            priority_aging_s=args.priority_aging_s,
            batch_wait_ms=args.batch_wait_ms,
            batch_wait_tokens=args.batch_wait_tokens,
            chunked_prefill=args.enable_chunked_prefill,
            target_gap_ms=target_gap(args, device),
            waits_for_draws=args.parallel.pipeline_parallel_size > 1,
        ),
        cache=_cache(args, spec, device.type, decide),
        kv_cache_memory=args.kv_cache_memory,
        gpu_memory_utilization=args.gpu_memory_utilization,
        seed=args.seed or 0,  # of random weights, which are the same at every start
        enforce_eager=args.enforce_eager,
        attention_backend=args.attention_backend,
        load_format=args.load_format,
        decisions=tuple(decisions),
    )
    return config, device, dtype


def _check_ranks(args: EngineArgs, spec: ModelSpec, device: str) -> None:
    if args.parallel.num_ranks == 1:
        return
    asked = str(args.parallel)
    if spec.moe is not None and args.parallel.num_beside > spec.moe.router.num_experts:
        raise NotSupported(
            f"got {asked} for {spec.moe.router.num_experts} experts, want at least an expert for"
            " each rank; use fewer"
        )
    if args.parallel.num_redundant_experts and args.load_format == "dummy":
        raise NotSupported(
            f"got num_redundant_experts={args.parallel.num_redundant_experts} with load_format="
            "'dummy': copies of experts are read from the model's files; leave one of them out"
        )
    if args.kv_role != "both":
        raise NotSupported(
            f"got {asked} with kv_role={args.kv_role!r}: a page is in parts on all ranks, and an"
            " engine offers or takes those of one only so far; leave kv_role out, or use one rank"
        )
    if args.parallel.data_parallel_size > 1 and (args.kv_host_memory or args.kv_disk):
        raise NotSupported(
            f"got {asked} with pages kept outside the pool (kv_host_memory, kv_disk): tiers keep"
            " shares of pages that all ranks have, and here each rank has pages of its own; leave"
            " them out, or use tensor_parallel_size"
        )
    if args.speculative_config is not None:
        _check_drafts(args, spec)


def _check_gpus(args: EngineArgs) -> None:
    """What ranks do on CPUs alone so far."""
    import torch

    asked = args.parallel
    if asked.num_ranks == 1:
        if args.device not in ("auto", "cuda"):
            places_of(args.device, 1, torch.cuda.device_count())
        return
    absent = {
        f"nnodes={asked.nnodes}": asked.nnodes > 1,
        f"num_redundant_experts={asked.num_redundant_experts}": asked.num_redundant_experts > 0,
        "kv_host_memory": args.kv_host_memory is not None,
        "kv_disk": args.kv_disk is not None,
        "lora": args.lora is not None and asked.data_parallel_size > 1,
    }
    for what, is_asked in absent.items():
        if is_asked:
            raise NotSupported(
                f"got {asked} on GPUs with {what}, which ranks have on CPUs only so far; leave it"
                " out, or use device='cpu'"
            )


def _check_drafts(args: EngineArgs, spec: ModelSpec) -> None:
    """What drafts on the first rank must not need what only others have."""
    asked, config = str(args.parallel), parse_speculative(args.speculative_config)
    part, stages = config.model_part, args.parallel.pipeline_parallel_size
    if part is not None and args.parallel.data_parallel_size > 1:
        raise NotSupported(
            f"got {asked} with speculative_config.method={part!r}: a model that drafts is on"
            " the first rank, which has pages of its own requests alone; use method 'suffix'"
            " or 'ngram', or tensor_parallel_size"
        )
    if part == "early_exit" and any(window is not None for window in spec.windows):
        raise NotSupported(
            f"got {asked} with speculative_config.method={part!r} for a model with layers that see"
            " only a window: on ranks an exit has pages of its own, which keep no windows; use"
            " 'draft_model', 'eagle3', 'suffix' or 'ngram', or one rank"
        )
    if part == "eagle3" and stages > 1:
        raise NotSupported(
            f"got {asked} with speculative_config.method={part!r}: it reads what goes into layers"
            " that are on other stages; use 'draft_model', 'medusa', 'suffix' or 'ngram', or"
            " pipeline_parallel_size=1"
        )
    if stages > 1 and config.token_tree(config.levels) is not None:
        raise NotSupported(
            f"got {asked} with a tree of drafts: later stages never hear which of them were right;"
            " leave speculative_config's tree out, or use pipeline_parallel_size=1"
        )


def _cache(
    args: EngineArgs, spec: ModelSpec, device: str, decide: Callable[[str, object, str], None]
) -> CacheConfig:
    """What "auto" means is decided when the weights are in: `engine/build.py`."""
    name = parse_cache_dtype(args.kv_cache_dtype)
    config = CacheConfig(args.page_size, 0, args.enable_prefix_caching)
    if name == "auto":
        return config
    if spec.mla is not None and device != "cpu":
        raise NotSupported(
            f"got kv_cache_dtype={args.kv_cache_dtype!r} for {spec.architecture} on {device}:"
            " latents are kept as codes on CPUs only so far; leave it out"
        )
    if spec.mla is not None and name == "int4":
        raise NotSupported(
            f"got kv_cache_dtype={args.kv_cache_dtype!r} for {spec.architecture}, whose cache keeps"
            " latents: they are kept in 'int8' or 'fp8'"
        )
    windows = [spec.window_of(layer) for layer in range(spec.num_layers)]
    skipped = skipped_layers(args.kv_cache_dtype_skip_layers, windows)
    left = f", {len(skipped)} of {spec.num_layers} layers left out" if skipped else ""
    decide("kv cache dtype", name, f"asked for{left}")
    return replace(config, dtype=name, skipped=skipped)


def _default(value: int | None, default: int) -> int:
    return default if value is None else value


def _max_num_seqs(args: EngineArgs, device: torch.device) -> tuple[int, str]:
    from quire.runner.device import total_memory

    if args.max_num_seqs is not None:
        return args.max_num_seqs, "asked for"
    if device.type == "cpu":
        return CPU_SEQS, "default on cpu"
    if total_memory(device) >= LARGE_CUDA:
        return LARGE_CUDA_SEQS, "default on cuda with 64 GiB or more"
    return CUDA_SEQS, "default on cuda"


def _max_model_len(
    args: EngineArgs, spec: ModelSpec, device: str, decide: Callable[[str, object, str], None]
) -> int:
    limit, why = spec.max_positions, "the model's own limit"
    if args.max_model_len is not None:
        scaled = spec.rope is not None and spec.rope.kind == "dynamic"
        if spec.rope is not None and spec.rope.kind in ("linear", "yarn"):
            limit = max(limit, int(spec.rope.original_max * spec.rope.factor))
        if args.max_model_len > limit and not scaled:
            raise NotSupported(
                f"got max_model_len={args.max_model_len}, but the most is {limit} ({why});"
                f" use max_model_len={limit} or less"
            )
        limit, why = args.max_model_len, "asked for"
    elif device == "cpu" and limit > DEFAULT_CPU_LEN:
        limit, why = DEFAULT_CPU_LEN, f"default on cpu; the model goes to {spec.max_positions}"
    decide("max_model_len", limit, why)
    return limit
