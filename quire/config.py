"""Frozen configuration, one small record per owner; `resolve.py` makes these from EngineArgs.

Nothing is changed after the engine is built; a changed value means a new object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SchedConfig:
    """What the scheduler reads."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    max_chunk: int = 0  # most prompt tokens of one request in a step; 0: the whole budget
    policy: str = "fcfs"  # or "priority", or "fair" among keys
    priority_aging_s: float = 30.0  # seconds of waiting worth one level of priority
    batch_wait_ms: float = 0.0  # hold admissions this long for company ...
    batch_wait_tokens: int = 0  # ... unless this many prompt tokens already wait
    chunked_prefill: bool = True  # False: a prompt enters only as a whole
    target_gap_ms: float = 0.0  # prompts beside decodes shall not make a step longer; 0: they may
    waits_for_draws: bool = False  # a request enters no step before its last token is drawn


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What the page pool and its manager read."""

    page_size: int = 16
    num_pages: int = 0  # filled in by sizing
    prefix_caching: bool = True
    dtype: str = "auto"  # of keys and values, a name of `kv/forms.py`
    token_bytes: int = 0  # of one token in all layers; filled in when the form is known
    skipped: frozenset[int] = frozenset()  # layers that keep floats whatever `dtype` says


@dataclass(frozen=True, slots=True)
class Parallel:
    """The processes that hold a model together; `flat_args.py` sets these by their plain names."""

    tensor_parallel_size: int = 1  # ranks that share each layer among them
    pipeline_parallel_size: int = 1  # stages of layers, one behind the other
    data_parallel_size: int = 1  # ranks that attend their own requests, and share all else
    num_redundant_experts: int = 0  # of each layer, that live on a second rank as well
    eplb_step_interval: int = 3000  # steps after which it is looked which ones
    nnodes: int = 1  # machines that the ranks are on
    node_rank: int = 0  # which one this is
    master_addr: str = "127.0.0.1"  # where the first one listens for the others
    master_port: int = 29501
    rank_secret: str | None = None  # the file that all of them have in common
    distributed_timeout_seconds: int | None = None  # for the others to come
    tp_reduce: str = "exact"  # or "fast": sums are split, and bits depend on the number of ranks

    @property
    def num_ranks(self) -> int:
        return self.num_beside * self.pipeline_parallel_size

    @property
    def num_beside(self) -> int:
        """Ranks that share the layers of a stage, one way or the other."""
        return self.tensor_parallel_size * self.data_parallel_size

    def __str__(self) -> str:
        """For messages: what was asked for."""
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        asked = [f"{name}={getattr(self, name)}" for name in sizes if getattr(self, name) != 1]
        return ", ".join(asked) or "one rank"


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """Everything a user may say; None means: decide for me, and tell me why."""

    model: str = "default"
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_chunk: int = 0
    page_size: int = 16
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    scheduling_policy: str = "fcfs"
    priority_aging_s: float = 30.0
    batch_wait_ms: float = 0.0
    batch_wait_tokens: int = 0
    target_gap_ms: float | None = 0.0  # None: what suits a server here
    seed: int | None = 0  # of requests without one of their own; None: each draws afresh
    skip_tokenizer_init: bool = False
    enforce_eager: bool = False
    attention_backend: str | None = None
    num_threads: int | None = None
    quantization: str | None = None  # what weights are rounded to while they are loaded
    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: tuple[int | str, ...] = ()
    parallel: Parallel = Parallel()  # processes that hold the model together
    kv_host_memory: int | None = None  # bytes for pages that the pool has no room for
    kv_disk: str | None = None  # a folder that keeps pages across restarts
    kv_disk_size: int | None = None  # most bytes in that folder
    kv_role: str = "both"  # or "prefill", for other engines, or "decode", of what those computed
    kv_listen: str | None = None  # where an engine that prefills offers pages
    kv_peers: tuple[str, ...] = ()  # whom an engine that decodes may ask for pages
    kv_secret: str | None = None  # the file that engines have in common
    kv_transport: str = "sockets"  # "nixl" or "ipc"; the same in engines that exchange pages
    speculative_config: Mapping[str, object] | None = None  # `speculative.py` says what it may hold
    lora: Mapping[str, str] | None = None  # adapters to begin with: folders by name
    max_loras: int | None = None  # adapters in memory at once; None: 32
    max_cpu_loras: int | None = None  # copies on the host; None: an eighth of its free memory


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing `resolve` or sizing chose, with the reason; printed at start and by inspect."""

    what: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that `engine/build.py` needs besides the checkpoint itself."""

    device: str
    dtype: str
    sched: SchedConfig
    cache: CacheConfig
    kv_cache_memory: int | None
    gpu_memory_utilization: float
    seed: int
    enforce_eager: bool
    attention_backend: str | None
    load_format: str
    decisions: tuple[Decision, ...] = field(default=())
