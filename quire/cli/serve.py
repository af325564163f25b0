"""quire serve: an OpenAI-compatible server with a page that shows the engine at work.

Only flags live here; `server/supervisor.py` is what runs. Flag names follow vLLM's where it has
them.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from quire.cli.adapter_flags import add_adapter_flags
from quire.cli.engine_flags import (
    MODEL_HELP,
    add_engine_flags,
    add_model,
    comma_list,
    model_of,
)
from quire.cli.parser import VerbParser, whole
from quire.cli.replicas import add_replica_flag, run_replicas
from quire.cli.serve_models import add_models_flags, engine_fields, is_several
from quire.errors import BadRequest
from quire.obs.log import LEVELS

EXAMPLES = """
quire serve                                        the default model, on 127.0.0.1:8000
quire serve ./my-model --port 9000 --max-num-seqs 64
quire serve model.gguf --host 0.0.0.0 --api-key-file keys.txt
quire serve small=smollm2-135m-instruct coder.gguf --memory 8GiB --park-after 600
QUIRE_API_KEY=secret quire serve smollm2-360m-instruct --served-model-name gpt-mini
"""
LOG_FORMATS = ("auto", "text", "json")
_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s]+")  # as browsers send it
MAX_REQUESTS = 1_000_000
DAY_S, GIB = 86_400, 1 << 30
CACHE_FIELDS = ("answer_cache", "answer_cache_error")
MAX_DAYS, MAX_GIB = 3_650, 1 << 20
MAX_SECONDS = 31_536_000.0  # a year
MAX_PROCESSES, MAX_AUTO_PROCESSES, CPUS_PER_PROCESS = 64, 8, 8


def build_parser() -> VerbParser:
    parser = VerbParser("serve", "Serve models over HTTP.", EXAMPLES, "[MODEL ...]")
    parser.add_argument(
        "model_words",
        nargs="*",
        metavar="MODEL",
        help=f"{MODEL_HELP}; several, as NAME=MODEL too, or a .toml file of them",
    )
    add_model(parser, positional=False)
    http = parser.add_argument_group("http")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on")
    http.add_argument("--port", type=whole(1, 65_535), default=8000, help="port (default: 8000)")
    http.add_argument("--http-server", choices=("granian", "uvicorn"), default="granian")
    http.add_argument(
        "--api-processes",
        type=api_processes,
        default="auto",
        metavar="N",
        help="processes that speak HTTP on the port (default: auto, one for each 8 CPUs)",
    )
    add_replica_flag(http)
    http.add_argument("--allowed-origins", nargs="*", default=(), metavar="URL", help="for CORS")
    http.add_argument("--no-page", action="store_true", help="do not serve the page at /")
    _add_key_flags(parser)
    _add_model_flags(parser)
    _add_limit_flags(parser)
    _add_store_flags(parser)
    _add_cache_flags(parser)
    log = parser.add_argument_group("seeing")
    log.add_argument("--log-format", choices=LOG_FORMATS, default="auto")
    log.add_argument("--log-level", type=str.lower, choices=LEVELS, default="info", metavar="NAME")
    log.add_argument("--public-metrics", action="store_true", help="/metrics without a key")
    log.add_argument("--otlp-traces-endpoint", metavar="URL", help="send OpenTelemetry traces")
    _add_role_flags(parser)
    add_engine_flags(parser)
    return parser


def _add_role_flags(parser: VerbParser) -> None:
    add = parser.add_argument_group("prefill and decode apart").add_argument
    add("--role", dest="kv_role", metavar="NAME", help="prefill, decode or both (default: both)")
    add("--kv-listen", metavar="HOST:PORT", help="prefill: offer pages there")
    add("--kv-peers", type=comma_list, metavar="LIST", help="decode: HOST:PORT,... to ask for them")
    add("--kv-transport", metavar="NAME", help="how pages cross: sockets (default), nixl or ipc")
    add("--kv-secret", metavar="FILE", help="a file that all these engines have in common")


def _add_key_flags(parser: VerbParser) -> None:
    keys = parser.add_argument_group("keys")
    keys.add_argument("--api-key", action="append", default=[], metavar="KEY", help="may repeat")
    keys.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="a key a line, or KEY weight=N"
    )
    keys.add_argument("--admin-api-key", action="append", default=[], metavar="KEY")
    keys.add_argument(
        "--allow-unauthenticated",
        action="store_true",
        help="listen beyond this machine without any key",
    )
    keys.add_argument(
        "--share-prefix-cache",
        action="store_true",
        help="let callers with different keys hit each other's cached prefixes",
    )


def _add_model_flags(parser: VerbParser) -> None:
    model = parser.add_argument_group("model as clients see it")
    model.add_argument("--served-model-name", nargs="+", default=(), metavar="NAME")
    model.add_argument(
        "--accept-any-model", action="store_true", help="answer whatever model a client names"
    )
    model.add_argument("--chat-template", type=Path, metavar="FILE")
    model.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="sampling where a request says nothing: as the model's makers recommend, or plain",
    )
    model.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let clients send chat templates of their own (sandboxed)",
    )
    model.add_argument("--tool-call-parser", metavar="NAME", help="default: from the template")
    model.add_argument("--reasoning-parser", metavar="NAME", help="default: from the template")
    add_adapter_flags(parser)
    add_models_flags(parser)


def _add_store_flags(parser: VerbParser) -> None:
    from quire.server.settings import Limits

    usual, kept = Limits(), parser.add_argument_group("what is kept")
    kept.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="files, batches and responses, across restarts (default: a folder of the model in the"
        " cache)",
    )
    kept.add_argument("--no-store", action="store_true", help="nothing is kept")
    kept.add_argument(
        "--store-days",
        type=whole(1, MAX_DAYS),
        metavar="N",
        help=f"forget responses nobody used for so long (default: {usual.stored_s // DAY_S})",
    )
    kept.add_argument(
        "--store-gib-per-key",
        type=whole(1, MAX_GIB),
        metavar="N",
        help="files of one key, as much of responses, and as much of cached answers"
        f" (default: {usual.max_stored_bytes_per_key // GIB})",
    )


def _add_cache_flags(parser: VerbParser) -> None:
    from quire.server.cache_wish import MODES

    group = parser.add_argument_group("answers that were given before")
    group.add_argument(
        "--answer-cache",
        choices=MODES,
        default="off",
        help="the most that requests may ask of it: the same request again (exact), drafts of"
        " similar answers (draft), similar answers (answer) (default: off)",
    )
    group.add_argument(
        "--answer-cache-error",
        type=share,
        default=0.05,
        metavar="P",
        help="how often an answer of `answer` may be wrong (default: 0.05)",
    )


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise ArgumentTypeError(f"got {text!r}, want a number between 0 and 1")
    return value


def _add_limit_flags(parser: VerbParser) -> None:
    from quire.server.settings import Limits, ServeSettings

    usual, settings = Limits(), ServeSettings()

    def add(name: str, kind: Any, unit: str, help: str, shown: float, **options: Any) -> None:
        text = f"{help} (default: {shown:g})" if shown else f"{help} (default: no limit)"
        group.add_argument(name, type=kind, metavar=unit, help=text, **options)

    group = parser.add_argument_group("limits")
    count = whole(1, MAX_REQUESTS)
    add("--max-queued-requests", count, "N", "past those running", usual.max_queued_requests)
    add("--max-requests-per-key", count, "N", "open at once", usual.max_requests_per_key)
    add("--request-timeout", seconds, "S", "most a request may take", usual.request_timeout_s)
    add("--queue-timeout", seconds, "S", "most it may wait to start", usual.queue_timeout_s)
    drain, stall = settings.drain_s, settings.stall_kill_s
    add("--drain-timeout", seconds, "S", "to finish after SIGTERM", drain, default=drain)
    add("--stall-timeout", seconds, "S", "no step: restart engine", stall, default=stall)


def api_processes(text: str) -> int:
    """A number, or auto: one for each eight CPUs, up to eight."""
    if text == "auto":
        from quire.engine.usable_cpus import usable_cpus

        return max(1, min(MAX_AUTO_PROCESSES, usable_cpus() // CPUS_PER_PROCESS))
    return whole(1, MAX_PROCESSES)(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MAX_SECONDS:
        raise ArgumentTypeError(f"got {text!r}, want seconds above 0 and up to {MAX_SECONDS:.0f}")
    return value


def run(args: Namespace) -> int:
    asked = settings_of(args)  # mistakes first, before anything is downloaded
    check_port(args.host, args.port)
    from quire.obs.log import configure_logging
    from quire.router.gpus import gpu_shares
    from quire.server.supervisor import Supervisor

    shares = gpu_shares(args.replicas, [one.engine for one in asked.models or (asked,)])
    settings = settings_of(args, download=True)
    if args.replicas > 1:
        return run_replicas(args, settings, shares)
    secrets = [*settings.api_keys, *settings.admin_keys]
    configure_logging(settings.log_format, settings.log_level, secrets)
    return Supervisor(settings).run()


def settings_of(args: Namespace, download: bool = False) -> Any:
    from quire import env
    from quire.server.server import model_name
    from quire.server.settings import Limits, ServeSettings, is_loopback

    keys, weights = _keys(args)
    _check_names(args)
    if not is_loopback(args.host) and not keys and not args.allow_unauthenticated:
        raise BadRequest(
            f"got --host {args.host} without an API key: anyone who reaches this port could use the"
            " server; give --api-key, or --allow-unauthenticated if that is meant"
        )
    template = None
    if args.chat_template is not None:
        template = read_text(args.chat_template, "--chat-template")
    return ServeSettings(
        **engine_fields(args, download),
        memory=args.memory or 0,
        host=args.host,
        port=args.port,
        http_server=args.http_server,
        api_processes=1 if is_several(args.model_words) else args.api_processes,
        served_model_names=tuple(args.served_model_name) or (model_name(model_of(args)),),
        accept_any_model=args.accept_any_model,
        api_keys=keys,
        admin_keys=(*args.admin_api_key, *filter(None, [env.admin_key()])),
        key_weights=weights,
        public_metrics=args.public_metrics,
        share_prefix_cache=args.share_prefix_cache,
        chat_template=template,
        trust_request_chat_template=args.trust_request_chat_template,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        cors_origins=tuple(args.allowed_origins),
        page=not args.no_page,
        store_folder=_store_folder(args),
        **{name: getattr(args, name) for name in CACHE_FIELDS},
        drain_s=args.drain_timeout,
        stall_kill_s=args.stall_timeout,
        stall_s=min(30.0, args.stall_timeout),
        log_format=args.log_format,
        log_level=args.log_level,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        limits=Limits(**_given_limits(args)),
    )


def _store_folder(args: Namespace) -> str:
    from quire import env
    from quire.server.server import model_name

    if args.no_store:
        if args.store is not None:
            raise BadRequest(f"got both --store {args.store} and --no-store; give one of them")
        return ""
    if args.store is not None:
        return str(args.store.expanduser().absolute())
    model = model_of(args)
    mark = hashlib.sha256(os.path.abspath(model).encode()).hexdigest()[:8]
    name = re.sub(r"[^A-Za-z0-9._-]", "-", model_name(model))[:60]
    return str(env.cache_folder() / "store" / f"{name}-{mark}")


def _check_names(args: Namespace) -> None:
    """What the server would only look up when it runs, or at somebody's first request."""
    from quire.obs.trace import check_endpoint
    from quire.text.reasoning import REASONING
    from quire.text.tools.formats import TOOL_PARSERS

    if args.tool_call_parser is not None:
        TOOL_PARSERS.check(args.tool_call_parser)
    if args.reasoning_parser is not None:
        REASONING.check(args.reasoning_parser)
    if args.otlp_traces_endpoint is not None:
        check_endpoint(args.otlp_traces_endpoint)
    for origin in args.allowed_origins:
        if not _ORIGIN.fullmatch(origin):
            raise BadRequest(
                f"got --allowed-origins {origin!r}, want * or origins such as https://app.example"
            )
    if not all(name.strip() for name in args.served_model_name):
        raise BadRequest("got an empty --served-model-name; clients must have something to send")


def _given_limits(args: Namespace) -> dict[str, Any]:
    """Fields of Limits that were asked for."""
    given = {
        "max_queued_requests": args.max_queued_requests,
        "max_requests_per_key": args.max_requests_per_key,
        "request_timeout_s": args.request_timeout,
        "queue_timeout_s": args.queue_timeout,
        "stored_s": args.store_days and args.store_days * DAY_S,
        "max_stored_bytes_per_key": args.store_gib_per_key and args.store_gib_per_key * GIB,
    }
    return {name: value for name, value in given.items() if value is not None}


def _keys(args: Namespace) -> tuple[tuple[str, ...], dict[str, float]]:
    """All keys, and the weights of those that have one."""
    from quire import env
    from quire.server.keys import read_key

    given = [*args.api_key]
    if args.api_key_file is not None:
        lines = read_text(args.api_key_file, "--api-key-file").splitlines()
        given += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not given:
            raise BadRequest(f"--api-key-file {args.api_key_file} holds no key")
    if from_environment := env.api_key():
        given.append(from_environment)
    weights = dict(map(read_key, given))
    keys = tuple(read_key(text)[0] for text in given)
    if any(
        not key.isascii() or not key or key != key.strip() for key in [*keys, *args.admin_api_key]
    ):
        raise BadRequest("API keys must be ASCII, not empty, without blanks around them")
    return keys, {key: weight for key, weight in weights.items() if weight != 1.0}


def read_text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{flag} {path}: {error}") from None


def check_port(host: str, port: int) -> None:
    """A taken port is a plain mistake: say so before a model is loaded."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        raise BadRequest(
            f"cannot listen on {host}:{port}: {error}; choose another with --host or --port"
        ) from None
