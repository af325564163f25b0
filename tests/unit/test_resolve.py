"""resolve: every choice recorded with its reason, every refusal with a way out."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from quire.args_check import DTYPE_NAMES
from quire.config import EngineArgs, EngineConfig
from quire.errors import NotSupported
from quire.models.spec import ModelSpec, RopeSpec
from quire.resolve import CPU_SEQS, CPU_TOKENS, DEFAULT_CPU_LEN, resolve
from quire.runner.device import DTYPES

SPEC = ModelSpec(
    architecture="llama",
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=128,
    vocab_size=100,
    max_positions=4096,
    rope=RopeSpec("default", 10000.0, 16, 4096),
)


def resolved(spec: ModelSpec = SPEC, **args: Any) -> EngineConfig:
    return resolve(EngineArgs(**{"device": "cpu", **args}), spec)[0]


def decision(config: EngineConfig, what: str) -> tuple[str, str]:
    (found,) = [d for d in config.decisions if d.what == what]
    return found.value, found.why


def test_defaults_on_cpu() -> None:
    """Red when a default changes without the decision saying so."""
    config = resolved()
    assert decision(config, "device") == ("cpu", "asked for")
    assert decision(config, "dtype")[0] == config.dtype == "float32"
    assert decision(config, "max_model_len") == ("4096", "the model's own limit")
    assert decision(config, "max_num_seqs") == (str(CPU_SEQS), "default on cpu")
    assert decision(config, "max_num_batched_tokens") == (str(CPU_TOKENS), "default on cpu")
    assert (config.sched.max_num_seqs, config.sched.max_num_batched_tokens) == (
        CPU_SEQS,
        CPU_TOKENS,
    )


def test_what_was_asked_for_is_taken_and_said() -> None:
    """Red when an argument is not passed on."""
    config = resolved(
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=50,
        max_chunk=8,
        page_size=32,
        dtype="bfloat16",
        enable_prefix_caching=False,
        kv_cache_memory=12345,
        scheduling_policy="priority",
        priority_aging_s=2.0,
        batch_wait_ms=5.0,
        batch_wait_tokens=9,
        seed=11,
    )
    sched = config.sched
    assert (sched.max_model_len, sched.max_num_seqs, sched.max_num_batched_tokens) == (100, 3, 50)
    assert (sched.max_chunk, sched.policy, sched.priority_aging_s) == (8, "priority", 2.0)
    assert (sched.batch_wait_ms, sched.batch_wait_tokens) == (5.0, 9)
    assert (config.cache.page_size, config.cache.prefix_caching) == (32, False)
    assert (config.dtype, config.kv_cache_memory, config.seed) == ("bfloat16", 12345, 11)
    for what in ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        assert decision(config, what)[1] == "asked for"


def test_long_models_are_cut_on_cpu_unless_asked() -> None:
    """Red when a 128k model takes all memory of a laptop for its page tables."""
    long = replace(SPEC, max_positions=131072)
    value, why = decision(resolved(long), "max_model_len")
    assert value == str(DEFAULT_CPU_LEN) and "131072" in why
    assert resolved(long, max_model_len=131072).sched.max_model_len == 131072


def test_a_window_does_not_bound_the_context() -> None:
    """Red when a model whose layers see a window is cut to it: pages behind it are given back."""
    windowed = replace(SPEC, windows=(1024,) * SPEC.num_layers)
    assert resolved(windowed).sched.max_model_len == resolved(SPEC).sched.max_model_len > 1024
    assert resolved(windowed, max_model_len=2000).sched.max_model_len == 2000


def test_dynamic_rope_may_go_beyond_its_training() -> None:
    """Red when the one rope that scales by length is refused, or another one is allowed."""
    rope = RopeSpec("dynamic", 10000.0, 16, 4096)
    assert resolved(replace(SPEC, rope=rope), max_model_len=8192).sched.max_model_len == 8192
    with pytest.raises(NotSupported, match="use max_model_len=4096 or less"):
        resolved(max_model_len=8192)


def test_budget_grows_to_what_the_other_choices_need() -> None:
    """Red when a full house of decodes, or a whole prompt, does not fit a step."""
    config = resolved(max_num_seqs=64, max_num_batched_tokens=10)
    assert decision(config, "max_num_batched_tokens") == ("64", "one token for every sequence")
    config = resolved(enable_chunked_prefill=False)
    value, why = decision(config, "max_num_batched_tokens")
    assert (value, config.sched.max_num_batched_tokens) == ("4096", 4096)
    assert "chunked prefill" in why


REFUSALS: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: value}, f"{name}=")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
        for value in (0, -1, 1.5, "8")
    ),
    *(({"page_size": v}, "page_size=.*power of two") for v in (0, 3, -4, 2.0, "4")),
    *(
        ({"gpu_memory_utilization": v}, "gpu_memory_utilization=")
        for v in (0.0, 1.1, -1.0, float("nan"))
    ),
    ({"load_format": "pickle"}, "load_format='pickle'"),
    ({"scheduling_policy": "lifo"}, "scheduling_policy='lifo'"),
    ({"priority_aging_s": 0.0}, "priority_aging_s="),
    ({"max_chunk": -1}, "max_chunk"),
    ({"batch_wait_ms": -1.0}, "batch_wait_ms"),
    ({"batch_wait_tokens": -1}, "batch_wait_tokens"),
    *(
        ({name: value}, f"{name}=.*from . to [0-9]+")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_threads")
        for value in (10**8, 10**30, True)
    ),
    ({"page_size": 2**40}, "page_size=.*up to 4096"),
    *(({"kv_cache_memory": v}, "kv_cache_memory=") for v in (0, -1, 2**60, 1.5, "4GiB")),
    *(({"priority_aging_s": float(v)}, "priority_aging_s=") for v in ("nan", "inf")),
    *(({"batch_wait_ms": float(v)}, "batch_wait_ms=") for v in ("nan", "inf")),
    ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization='0.9'"),
    ({"seed": 2**64}, "seed="),
    ({"device": "tpu"}, "device='tpu'.*'cpu'"),
    ({"dtype": "int3"}, "dtype='int3'.*bfloat16"),
    # A prompt longer than max_chunk could never enter: the engine would wait for ever.
    ({"max_chunk": 8, "enable_chunked_prefill": False}, "max_chunk"),
]


@pytest.mark.parametrize(("args", "words"), REFUSALS, ids=lambda v: str(v)[:50])
def test_refusals_name_the_argument(args: dict[str, Any], words: str) -> None:
    """Red when a bad argument is accepted and fails later, far from its cause."""
    with pytest.raises(NotSupported, match=words):
        resolved(**args)


def test_every_name_of_a_dtype_is_one() -> None:
    """Red when a name passes the check and is not known to the runner, or the other way round."""
    assert {"auto", *DTYPES} == set(DTYPE_NAMES)


def test_engine_args_stay_few() -> None:
    """Red when the forty-first knob arrives."""
    assert len(fields(EngineArgs)) <= 40
