"""The router's process: composition root, and the end of its life. No torch is imported here.

SIGTERM drains: `/ready` goes first, nothing new is taken, open answers finish or meet the deadline.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from typing import Any

from quire.config import EngineArgs
from quire.load.open import open_tokenizer
from quire.obs.log import configure_logging, log_event
from quire.router.app import RouterApp
from quire.router.choose import Chooser
from quire.router.crew import Crew
from quire.router.prompt_keys import PromptKeys, TextKeys, TokenKeys
from quire.router.proxy import Proxy
from quire.router.settings import RouterSettings
from quire.router.tickets import Tickets
from quire.server.http_servers import make_http_server, stop_http_server
from quire.server.settings import ServeSettings

POLL_S = 0.05


def run_router(settings: RouterSettings) -> int:
    configure_logging(settings.log_format, settings.log_level, [settings.admin_key])
    prompts = prompt_keys_of(settings)
    run: Any = asyncio.run
    try:
        import uvloop
    except ImportError:
        pass
    else:
        run = uvloop.run
    return int(run(serve(settings, prompts)))


def prompt_keys_of(settings: RouterSettings) -> PromptKeys:
    if not settings.tokenizer or settings.policy != "prefix":
        return TextKeys()
    tokenizer = open_tokenizer(EngineArgs(model=settings.tokenizer))
    if settings.chat_template is not None:
        tokenizer = tokenizer.with_chat_template(settings.chat_template)
    return TokenKeys(tokenizer)


async def serve(settings: RouterSettings, prompts: PromptKeys) -> int:
    servers, helpers = (Crew(group, settings) for group in (settings.upstreams, settings.prefill))

    def proxy_of(crew: Crew) -> Proxy:
        chooser = Chooser(settings.policy)
        return Proxy(crew.upstreams, crew.clients, chooser, settings.attempts, settings.head_s)

    tickets = Tickets(proxy_of(helpers)) if settings.prefill else None
    app = RouterApp(settings, servers.upstreams, proxy_of(servers), prompts, tickets)
    listening = ServeSettings(
        host=settings.host, port=settings.port, http_server=settings.http_server
    )
    http = make_http_server(listening, app)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.ensure_future(http.serve())
    stopped = asyncio.ensure_future(stop.wait())
    log_event("router_listens", host=settings.host, port=settings.port, policy=settings.policy)
    parts: list[asyncio.Future[Any]] = [serving, servers.broke, helpers.broke, stopped]
    done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if stopped not in done:  # a part of it ended by itself: half a router is worse than none
        for part in done:
            reason = repr(part.exception()) if part is serving else part.result()
            log_event("router_broke", severity=logging.ERROR, reason=reason)
        code = 1
    await _drain(app, settings.drain_s)
    stop_http_server(http)
    await asyncio.wait([serving], timeout=2.0)
    for crew in (servers, helpers):
        await crew.close()
    return code


async def _drain(app: RouterApp, seconds: float) -> None:
    app.is_draining = True
    deadline = time.monotonic() + seconds
    while app.num_open and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    log_event("drained", unfinished=app.num_open)
