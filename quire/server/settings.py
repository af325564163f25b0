"""ServeSettings: everything `quire serve` may be told besides the engine's own arguments.

Plain values with defaults, decoded from JSON in each child process. Limits that exist to keep one
client from hurting the others are here too, so that a reader finds them in one place.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, replace
from typing import Literal

from quire.config import EngineArgs
from quire.routing.settings import AutoSettings

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what one request may ask; past them it is refused before any work."""

    max_body_bytes: int = 8 * MIB
    max_file_bytes: int = 200 * MIB  # of an upload to /v1/files
    max_messages: int = 2_000
    max_prompts: int = 64  # in one /v1/completions request
    max_inputs: int = 2_048  # texts in one /v1/embeddings request
    max_n: int = 16
    max_logprobs: int = 20
    max_stops: int = 16
    max_stop_chars: int = 256
    max_bad_words: int = 128
    max_bytes_per_token: int = 8  # a prompt of more bytes than this x context is not even tokenised
    body_idle_s: float = 10.0  # between two reads of a body
    body_total_s: float = 60.0
    max_json_values: int = 200_000  # lists, objects and keys: the parser needs a microsecond each
    max_open_body_bytes: int = 256 * MIB  # of all requests whose bodies are held at this moment
    write_stall_s: float = 30.0  # a reader that takes nothing for this long is dropped
    template_s: float = 5.0
    max_queued_requests: int = 256  # beyond as many as run at once; past it 429
    max_queued_tokens: int = 4_000_000  # prompt + max_tokens of everything accepted and unfinished
    request_timeout_s: float = 600.0  # the most any request may take, also its default
    queue_timeout_s: float = 60.0  # without a first token by then: 503
    max_requests_per_key: int = 0  # open at once for one key; 0: no limit
    # In files; again in what is remembered, and in answers.
    max_stored_bytes_per_key: int = 4_096 * MIB
    max_open_batches_per_key: int = 64
    max_background_responses_per_key: int = 256  # that are not done
    max_cached_answers_per_key: int = 4_096
    stored_s: int = 30 * 86_400  # responses and conversations, since somebody used them


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """One of several models behind a server."""

    name: str
    engine: EngineArgs
    default_sampling: dict[str, int | float] = field(default_factory=dict)
    at_start: bool = True  # False: at the first request
    park_after_s: float = 0.0  # without a request for this long its weights go; 0: they stay


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    engine: EngineArgs = field(default_factory=EngineArgs)
    host: str = "127.0.0.1"
    port: int = 8000
    http_server: str = "granian"  # or "uvicorn"
    api_processes: int = 1
    served_model_names: tuple[str, ...] = ()
    accept_any_model: bool = False
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    key_weights: dict[str, float] = field(default_factory=dict)  # of keys that have one; else 1
    public_metrics: bool = False
    share_prefix_cache: bool = False  # False: keys do not see each other's cached prefixes
    chat_template: str | None = None  # text of a template that replaces the model's
    trust_request_chat_template: bool = False
    # Where a request is silent. `int` first: as plain floats, top_k would come back as 20.0.
    default_sampling: dict[str, int | float] = field(default_factory=dict)
    tool_call_parser: str | None = None  # None: from the model's template
    reasoning_parser: str | None = None
    models: tuple[ModelSettings, ...] = ()  # several; none: `engine` alone
    auto: AutoSettings | None = None  # what `model: "auto"` means; None: nothing
    memory: int = 0  # bytes that the engines of several models may take together; 0: no limit
    store_folder: str = ""  # files, batches and responses; "": none are kept
    answer_cache: str = "off"  # the most that requests may ask of it: exact, draft or answer
    answer_cache_error: float = 0.05  # chance that an answer by `answer` is wrong, at most
    cors_origins: tuple[str, ...] = ()
    page: bool = True
    drain_s: float = 30.0
    stall_s: float = 30.0  # no step for this long with work waiting: not ready
    stall_kill_s: float = 120.0  # ... and for this long: the engine is restarted
    log_format: Literal["auto", "text", "json"] = "auto"
    log_level: str = "info"
    log_prompts: bool = False
    otlp_traces_endpoint: str | None = None
    limits: Limits = field(default_factory=Limits)
    runtime_folder: str = ""  # filled in by the supervisor
    api_index: int = 0  # the same: which of the API processes reads this
    parks: bool = False  # the same: an engine that shall be able to leave its GPU's memory
    is_parked: bool = False  # the same: an engine that waits for SIGUSR2 before it loads weights

    def of_model(self, index: int, runtime_folder: str) -> ServeSettings:
        """As a server of one of its models reads them."""
        own = self.models[index]
        return replace(
            self,
            engine=own.engine,
            served_model_names=(own.name,),
            default_sampling=own.default_sampling,
            runtime_folder=runtime_folder,
            models=(),
            auto=None,
        )

    @property
    def is_local(self) -> bool:
        """Only this machine can reach us."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
