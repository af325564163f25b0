"""quire route: one address in front of engines that prefill and engines that decode."""

from __future__ import annotations

import asyncio
import signal
from argparse import Namespace
from typing import TYPE_CHECKING

from quire.cli.engine_flags import comma_list
from quire.cli.parser import VerbParser, whole
from quire.cli.show import note
from quire.errors import BadRequest

if TYPE_CHECKING:
    from quire.router.router import Router

EXAMPLES = """
quire serve --role prefill --port 8001 --kv-listen 127.0.0.1:7300
quire serve --role decode --port 8002 --kv-peers 127.0.0.1:7300
quire route --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002
"""


def build_parser() -> VerbParser:
    parser = VerbParser("route", "Route requests to engines that prefill and decode.", EXAMPLES, "")
    add = parser.add_argument
    add("--prefill", type=comma_list, default=(), metavar="LIST", help="URLs of engines")
    add("--decode", type=comma_list, default=(), metavar="LIST", help="URLs of engines")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=whole(1, 65_535), default=8000, help="port (default: 8000)")
    return parser


def run(args: Namespace) -> int:
    from quire.obs.log import configure_logging
    from quire.router.router import Engine, Router

    if not args.decode:
        raise BadRequest("got no --decode: say which engines answer")
    router = Router(list(map(Engine.of, args.prefill)), list(map(Engine.of, args.decode)))
    configure_logging("auto", "info")
    return asyncio.run(_serve(router, args.host, args.port))


async def _serve(router: Router, host: str, port: int) -> int:
    from quire.router.messages import MAX_HEAD

    try:
        server = await asyncio.start_server(router.handle, host, port, limit=MAX_HEAD)
    except OSError as error:
        raise BadRequest(
            f"cannot listen on {host}:{port}: {error}; choose another with --host or --port"
        ) from None
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    note(f"routing on http://{host}:{port}")
    async with server:
        await stop.wait()
    return 0
