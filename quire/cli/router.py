"""quire router: one address in front of several servers. Only flags live here; see `router/`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from quire.cli.parser import VerbParser, whole
from quire.cli.serve import LOG_FORMATS, check_port, read_text, seconds
from quire.errors import BadRequest
from quire.obs.log import LEVELS

EXAMPLES = """
quire router --upstream http://10.0.0.5:8000 --upstream http://10.0.0.6:8000 --tokenizer MODEL
quire router --upstream a=http://127.0.0.1:8001 --upstream b=http://127.0.0.1:8002 --port 9000
quire router --upstream dns+http://engines:8000 --tokenizer MODEL     whoever has that name
quire router --prefill http://127.0.0.1:8001 --upstream http://127.0.0.1:8002   roles apart
curl -X POST localhost:9000/router/drain/a         send it nothing more
"""
UPSTREAM_HELP = "may repeat; dns+http://NAME:PORT: a server at each address of the name"
POLICIES = ("prefix", "least-loaded", "round-robin")


def build_parser() -> VerbParser:
    parser = VerbParser("router", "One address in front of several servers.", EXAMPLES, "")
    add = parser.add_argument
    add("--upstream", action="append", default=[], metavar="[NAME=]URL", help=UPSTREAM_HELP)
    add("--prefill", action="append", default=[], metavar="[NAME=]URL", help="of --role prefill")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=whole(1, 65_535), default=8000, help="port (default: 8000)")
    add("--http-server", choices=("granian", "uvicorn"), default="granian")
    add("--policy", choices=POLICIES, default="prefix", help="who answers (default: prefix)")
    add(
        "--tokenizer",
        metavar="MODEL",
        help="of the model served: prefixes are matched with what Quire's servers hold; without"
        " it, with what was sent to each",
    )
    add("--chat-template", type=Path, metavar="FILE", help="as the servers were given")
    add(
        "--admin-api-key",
        default="",
        metavar="KEY",
        help="of the servers; else QUIRE_ADMIN_API_KEY",
    )
    add("--public-metrics", action="store_true", help="/metrics without a key")
    add("--share-prefix-cache", action="store_true", help="as the servers were given")
    add("--drain-timeout", type=seconds, default=30.0, metavar="S", help="to finish after SIGTERM")
    add("--log-format", choices=LOG_FORMATS, default="auto")
    add("--log-level", type=str.lower, choices=LEVELS, default="info", metavar="NAME")
    return parser


def run(args: Namespace) -> int:
    settings = settings_of(args)
    check_port(args.host, args.port)
    from quire.router.main import run_router

    return run_router(settings)


def settings_of(args: Namespace) -> Any:
    from quire import env
    from quire.router.settings import RouterSettings, UpstreamAddress

    if not args.upstream:
        raise BadRequest("no upstream: give --upstream URL, once for each server")
    if args.chat_template is not None and not args.tokenizer:
        raise BadRequest("got --chat-template without --tokenizer, whose template it replaces")
    template = None
    if args.chat_template is not None:
        template = read_text(args.chat_template, "--chat-template")
    return RouterSettings(
        upstreams=tuple(map(UpstreamAddress.parse, args.upstream)),
        prefill=tuple(map(UpstreamAddress.parse, args.prefill)),
        host=args.host,
        port=args.port,
        http_server=args.http_server,
        policy=args.policy,
        tokenizer=args.tokenizer or "",
        chat_template=template,
        admin_key=args.admin_api_key or env.admin_key() or "",
        public_metrics=args.public_metrics,
        share_prefix_cache=args.share_prefix_cache,
        drain_s=args.drain_timeout,
        log_format=args.log_format,
        log_level=args.log_level,
    )
