"""The options that build an engine, shared by every verb that needs one.

An option that was not given stays None and is not passed on, so the one list of defaults remains
`EngineArgs`. `open_llm` shows the download before the engine starts to load.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.cli.parser import VerbParser, json_object, positive, size_bytes
from quire.errors import BadRequest

if TYPE_CHECKING:
    from quire.config import EngineArgs
    from quire.llm import LLM

# attribute of the parsed options -> field of EngineArgs
FIELDS = {
    "device": "device",
    "dtype": "dtype",
    "quantization": "quantization",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "page_size": "page_size",
    "prefix_caching": "enable_prefix_caching",
    "kv_cache_memory": "kv_cache_memory",
    "kv_cache_dtype": "kv_cache_dtype",
    "kv_cache_dtype_skip_layers": "kv_cache_dtype_skip_layers",
    "kv_host_memory": "kv_host_memory",
    "kv_disk": "kv_disk",
    "kv_disk_size": "kv_disk_size",
    "kv_role": "kv_role",
    "kv_listen": "kv_listen",
    "kv_peers": "kv_peers",
    "kv_secret": "kv_secret",
    "kv_transport": "kv_transport",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "scheduling_policy": "scheduling_policy",
    "target_gap_ms": "target_gap_ms",
    "engine_seed": "seed",
    "load_format": "load_format",
    "threads": "num_threads",
    "enforce_eager": "enforce_eager",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "tp_reduce": "tp_reduce",
    "nnodes": "nnodes",
    "node_rank": "node_rank",
    "master_addr": "master_addr",
    "master_port": "master_port",
    "rank_secret": "rank_secret",
    "distributed_timeout_seconds": "distributed_timeout_seconds",
    "num_redundant_experts": "num_redundant_experts",
    "eplb_step_interval": "eplb_step_interval",
    "speculative_config": "speculative_config",
}
MODEL_HELP = "known name, folder, .gguf file or hub repository (default: default)"


def add_model(parser: VerbParser, *, positional: bool = True) -> None:
    """`--model NAME`, and MODEL as the first word where words mean nothing else."""
    if positional:
        parser.add_argument("model_word", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--model", "-m", metavar="MODEL", help=MODEL_HELP)


def add_engine_flags(parser: VerbParser) -> None:
    _add_rank_flags(parser)
    _add_cache_flags(parser)
    add = parser.add_argument_group("engine").add_argument
    add("--device", metavar="NAME", help="auto, cpu, cuda, or a GPU for each rank: cuda:0,cuda:1")
    add("--dtype", metavar="NAME", help="auto, float32, bfloat16 or float16")
    add(
        "--quantization",
        metavar="NAME",
        help="round weights at load: fp8, int8, nf4, mxfp4, rtn-int4-g32 and the like",
    )
    add("--max-model-len", type=positive, metavar="N", help="most tokens of prompt and answer")
    add("--max-num-seqs", type=positive, metavar="N", help="most requests running at once")
    add("--max-num-batched-tokens", type=positive, metavar="N", help="most tokens fed in one step")
    add("--gpu-memory-utilization", type=float, metavar="X", help="share of GPU memory to use")
    add("--scheduling-policy", metavar="NAME", help="fcfs, priority, or fair among keys")
    add("--target-gap-ms", type=float, metavar="MS", help="most that prompts may hold up a token")
    add("--seed", dest="engine_seed", type=int, metavar="N", help="makes what is drawn repeat")
    add("--load-format", metavar="NAME", help="auto, or dummy for random weights")
    add("--threads", type=positive, metavar="N", help="CPU threads")
    add(
        "--enforce-eager",
        action="store_const",
        const=True,
        help="layer by layer: no CUDA graphs, no recorded steps",
    )
    add(
        "--speculative-config",
        type=json_object,
        metavar="JSON",
        help="""who drafts, such as '{"method": "suffix"}'""",
    )


def _add_cache_flags(parser: VerbParser) -> None:
    add = parser.add_argument_group("cache of keys and values").add_argument
    add("--page-size", type=positive, metavar="N", help="tokens in a page, a power of two")
    add(
        "--no-prefix-caching",
        dest="prefix_caching",
        action="store_const",
        const=False,
        help="compute every prompt in full",
    )
    add("--kv-cache-memory", type=size_bytes, metavar="SIZE", help="such as 4GiB or 512MiB")
    add("--kv-cache-dtype", metavar="NAME", help="auto, int8, fp8 or int4: more tokens in memory")
    add(
        "--kv-cache-dtype-skip-layers",
        type=comma_list,
        metavar="LIST",
        help="layers that keep floats, such as 0,29 or sliding_window",
    )
    add("--kv-host-memory", type=size_bytes, metavar="SIZE", help="for pages that left the cache")
    add("--kv-disk", metavar="DIR", help="keep pages there: restarts remember conversations")
    add("--kv-disk-size", type=size_bytes, metavar="SIZE", help="most bytes there (default: 8GiB)")


def _add_rank_flags(parser: VerbParser) -> None:
    add = parser.add_argument_group("ranks").add_argument
    add(
        "--tensor-parallel-size",
        "-tp",
        type=positive,
        metavar="N",
        help="processes that hold the model together, to the same bits",
    )
    add(
        "--pipeline-parallel-size",
        "-pp",
        type=positive,
        metavar="N",
        help="stages of layers one behind the other, each so many processes",
    )
    add(
        "--data-parallel-size",
        "-dp",
        type=positive,
        metavar="N",
        help="processes that keep pages of their own requests, and share experts and all else",
    )
    add(
        "--num-redundant-experts",
        type=positive,
        metavar="N",
        help="of each layer, the most visited live on two ranks",
    )
    add("--eplb-step-interval", type=positive, metavar="N", help="steps between two looks at that")
    add("--tp-reduce", metavar="NAME", help="exact, or fast: sums are split, bits may differ")
    add("--nnodes", type=positive, metavar="N", help="machines; the others run 'quire join'")
    add("--node-rank", type=int, metavar="N", help="0: this is the first of them")
    add("--master-addr", metavar="HOST", help="where this machine listens for the others")
    add("--master-port", type=positive, metavar="N", help="(default: 29501)")
    add("--rank-secret", metavar="FILE", help="the file that all machines have in common")
    add("--distributed-timeout-seconds", type=positive, metavar="N", help="for them to come")


def comma_list(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def model_of(args: Namespace) -> str:
    word = getattr(args, "model_word", None)
    if word and args.model and word != args.model:
        raise BadRequest(f"got two models, {word!r} and --model {args.model!r}; give one")
    return str(word or args.model or "default")


def engine_options(args: Namespace) -> dict[str, Any]:
    """What was asked for, as keyword arguments of `LLM` and `args_of`."""
    values = {field: getattr(args, name, None) for name, field in FIELDS.items()}
    return {field: value for field, value in values.items() if value is not None}


def checked_args(args: Namespace, **more: Any) -> EngineArgs:
    """What was asked for, once it is known to make sense; nothing is downloaded or loaded."""
    from quire.args_check import check_args
    from quire.flat_args import args_of

    made = args_of({"model": model_of(args)} | engine_options(args) | more)
    check_args(made)
    return made


def engine_args(args: Namespace, **more: Any) -> EngineArgs:
    """The same as a record, the model resolved to a path (and downloaded if need be)."""
    from quire.cli.download import fetch

    return replace(checked_args(args, **more), model=str(fetch(model_of(args))))


def open_llm(args: Namespace, **more: Any) -> LLM:
    from quire.cli.download import fetch
    from quire.llm import LLM

    checked_args(args, **more)
    return LLM(str(fetch(model_of(args))), **(engine_options(args) | more))
