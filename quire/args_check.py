"""check_args: what EngineArgs may say, whatever the model and the device; torch-free and instant.

The command line asks before anything is downloaded, `resolve` for everybody else. Bounds are far
beyond what makes sense and below what a table of that size does to a machine. Limits that depend
on the model (its context) or on memory are `resolve.py`'s and `memory/sizing.py`'s.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from quire.config import EngineArgs, Parallel
from quire.dist.devices import is_device
from quire.errors import NotSupported
from quire.kv.forms import parse_cache_dtype
from quire.quant.form_name import check_form
from quire.quant.methods import stored_method
from quire.speculative import parse_speculative

DTYPE_NAMES = ("auto", "bfloat16", "float", "float16", "float32", "half")
LOAD_FORMATS = ("auto", "dummy")
TRANSPORTS = ("sockets", "nixl", "ipc")
ROLES = ("both", "prefill", "decode")
POLICIES = ("fcfs", "priority", "fair")
REDUCES = ("exact", "fast")

MAX_MODEL_LEN = 1 << 24
MAX_SEQS = 1 << 14  # a row of the token table each
MAX_BATCHED_TOKENS = 1 << 20
MAX_PAGE_SIZE = 1 << 12
MAX_CACHE_BYTES = 1 << 50
MIN_DISK = 1 << 20
MAX_WAIT_MS = 60_000.0
MAX_AGING_S = 1e9
MAX_RANKS = 64
MAX_REDUNDANT = 1 << 10
MAX_INTERVAL = 1 << 30
MAX_LORAS = 1 << 12
THREADS_PER_CPU = 8  # OpenMP breaks down on thousands


def check_args(args: EngineArgs) -> None:
    """Raises NotSupported with the argument, its value and what it may be."""
    _check_choices(args)
    cpus = os.cpu_count() or 1
    _whole("max_model_len", args.max_model_len, 1, MAX_MODEL_LEN)
    _whole("max_num_seqs", args.max_num_seqs, 1, MAX_SEQS)
    _whole("max_num_batched_tokens", args.max_num_batched_tokens, 1, MAX_BATCHED_TOKENS)
    _whole("max_chunk", args.max_chunk, 0, MAX_BATCHED_TOKENS)
    _whole("batch_wait_tokens", args.batch_wait_tokens, 0, MAX_BATCHED_TOKENS)
    _whole("kv_cache_memory", args.kv_cache_memory, 1, MAX_CACHE_BYTES, " bytes")
    _whole("kv_host_memory", args.kv_host_memory, 1, MAX_CACHE_BYTES, " bytes")
    _whole("kv_disk_size", args.kv_disk_size, MIN_DISK, MAX_CACHE_BYTES, " bytes")
    _check_tiers(args)
    _whole("seed", args.seed, -(2**63), 2**63 - 1)
    most = THREADS_PER_CPU * cpus
    _whole(
        "num_threads", args.num_threads, 1, most, f" ({THREADS_PER_CPU} for each of {cpus} CPUs)"
    )
    _check_ranks(args.parallel)
    _whole("max_loras", args.max_loras, 1, MAX_LORAS)
    _whole("max_cpu_loras", args.max_cpu_loras, 1, MAX_LORAS)
    size = args.page_size
    if not _is_whole(size) or not 1 <= size <= MAX_PAGE_SIZE or size & (size - 1):
        raise NotSupported(f"got page_size={size!r}, want a power of two up to {MAX_PAGE_SIZE}")
    _number("gpu_memory_utilization", args.gpu_memory_utilization, 1.0)
    _number("priority_aging_s", args.priority_aging_s, MAX_AGING_S)
    _number("batch_wait_ms", args.batch_wait_ms, MAX_WAIT_MS, may_be_zero=True)
    if args.target_gap_ms is not None:
        _number("target_gap_ms", args.target_gap_ms, MAX_WAIT_MS, may_be_zero=True)
    if args.target_gap_ms and not args.enable_chunked_prefill:
        raise NotSupported(
            f"got target_gap_ms={args.target_gap_ms:g} with enable_chunked_prefill=False: steps"
            " keep their time by cutting prompts into chunks; drop one of the two"
        )
    if args.max_chunk and not args.enable_chunked_prefill:
        raise NotSupported(
            f"got max_chunk={args.max_chunk} with enable_chunked_prefill=False: prompts are either"
            " cut into chunks or not; drop one of the two"
        )


def _check_ranks(asked: Parallel) -> None:
    _whole("tensor_parallel_size", asked.tensor_parallel_size, 1, MAX_RANKS)
    _whole("pipeline_parallel_size", asked.pipeline_parallel_size, 1, MAX_RANKS)
    _whole("data_parallel_size", asked.data_parallel_size, 1, MAX_RANKS)
    for other in ("tensor_parallel_size", "pipeline_parallel_size"):
        if asked.data_parallel_size > 1 and getattr(asked, other) > 1:
            raise NotSupported(
                f"got {asked}: where ranks have requests of their own, each attends with all heads"
                f" in all layers so far; use data_parallel_size or {other}, not both"
            )
    _whole("num_redundant_experts", asked.num_redundant_experts, 0, MAX_REDUNDANT)
    _whole("eplb_step_interval", asked.eplb_step_interval, 1, MAX_INTERVAL)
    _whole("nnodes", asked.nnodes, 1, MAX_RANKS)
    _whole("master_port", asked.master_port, 1, 65535)
    _whole("distributed_timeout_seconds", asked.distributed_timeout_seconds, 1, 1 << 20)
    if asked.node_rank != 0:
        raise NotSupported(
            f"got node_rank={asked.node_rank}: an engine is the first machine's; run"
            f" 'quire join --node-rank {asked.node_rank}' on the others"
        )
    if asked.num_ranks % asked.nnodes:
        raise NotSupported(
            f"got nnodes={asked.nnodes} for {asked.num_ranks} ranks, want as many on each machine"
        )
    _one_of("tp_reduce", asked.tp_reduce, REDUCES)
    if asked.num_ranks > MAX_RANKS:
        raise NotSupported(f"got {asked}, {asked.num_ranks} ranks, want {MAX_RANKS} or less")


def _check_tiers(args: EngineArgs) -> None:
    """Of pages outside the pool."""
    _one_of("kv_role", args.kv_role, ROLES)
    _one_of("kv_transport", args.kv_transport, TRANSPORTS)
    if args.kv_role == "decode" and not args.kv_peers:
        raise NotSupported("got kv_role='decode' without kv_peers: say which engines prefill")
    if args.kv_peers and args.kv_role != "decode":
        raise NotSupported(
            f"got kv_peers={args.kv_peers} with kv_role={args.kv_role!r}, want 'decode'"
        )
    if args.kv_listen and args.kv_role != "prefill":
        raise NotSupported(
            f"got kv_listen={args.kv_listen!r} with kv_role={args.kv_role!r}, want 'prefill'"
        )
    if args.kv_disk_size is not None and args.kv_disk is None:
        raise NotSupported(
            f"got kv_disk_size={args.kv_disk_size} without kv_disk: say which folder it is for"
        )
    if has_tiers(args) and not args.enable_prefix_caching:
        what = tier_asked(args)
        raise NotSupported(
            f"got {what} with enable_prefix_caching=False: pages are found by their prefix;"
            " drop one of the two"
        )


def has_tiers(args: EngineArgs) -> bool:
    return bool(args.kv_disk or args.kv_host_memory) or args.kv_role != "both"


def tier_asked(args: EngineArgs) -> str:
    """The argument that asks for a tier, for messages."""
    if args.kv_role != "both":
        return f"kv_role={args.kv_role!r}"
    return "kv_disk" if args.kv_disk else "kv_host_memory"


def _check_choices(args: EngineArgs) -> None:
    if args.speculative_config is not None:
        parse_speculative(args.speculative_config)
    if not is_device(args.device):
        raise NotSupported(
            f"got device={args.device!r}, want 'auto', 'cpu', 'cuda' or a GPU for each rank, as"
            " 'cuda:0,cuda:1'"
        )
    _one_of("dtype", args.dtype, DTYPE_NAMES)
    _one_of("load_format", args.load_format, LOAD_FORMATS)
    _one_of("scheduling_policy", args.scheduling_policy, POLICIES)
    parse_cache_dtype(args.kv_cache_dtype)
    if args.quantization is not None and stored_method(args.quantization) is None:
        check_form(args.quantization)


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        *others, last = map(repr, known)
        raise NotSupported(f"got {name}={value!r}, want {', '.join(others)} or {last}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(name: str, value: int | None, least: int, most: int, unit: str = "") -> None:
    if value is not None and (not _is_whole(value) or not least <= value <= most):
        raise NotSupported(
            f"got {name}={value!r}, want a whole number from {least} to {most}{unit}"
        )


def _number(name: str, value: float, most: float, *, may_be_zero: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and 0 <= value <= most and (value or may_be_zero):  # NaN is in no interval
        return
    least = "from 0" if may_be_zero else "above 0"
    raise NotSupported(f"got {name}={value!r}, want a number {least} to {most:g}")
