"""An API process: settings on stdin, HTTP on a port, the engine at the end of a unix socket.

One event loop runs the HTTP server, the engine link and the watchman. SIGTERM drains: readiness
goes first, nothing new is admitted, what runs finishes or meets the deadline, then exit 0.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from quire.config import Decision
from quire.engine.commands import Hello
from quire.errors import BadRequest, CheckpointError, QuireError
from quire.kept.records import Bounds
from quire.load.card import ModelCard, open_card
from quire.load.open import open_tokenizer
from quire.load.verdict import open_verdict
from quire.models.sequence_head import Verdict
from quire.obs.log import configure_logging, log_event
from quire.obs.trace import make_tracer
from quire.server.answer_cache import cache_of
from quire.server.app import App
from quire.server.background_responses import BackgroundResponses
from quire.server.batch_runner import BatchRunner
from quire.server.http_servers import make_http_server, stop_http_server
from quire.server.inside import Inside
from quire.server.lifeline import begin
from quire.server.link import EngineLink
from quire.server.model_files import SOCKET, ModelFolder, folder_of
from quire.server.models import Models
from quire.server.problems import Problem
from quire.server.responses import make_response
from quire.server.routes import batch_handlers, routes
from quire.server.server import Server
from quire.server.settings import ServeSettings
from quire.server.shelf import Shelf
from quire.server.siblings import Siblings
from quire.text.tokenizer import Tokenizer

POLL_S, STOP_S = 0.05, 2.0
BAD_INPUT, FAILED = 2, 1


def main() -> int:
    settings = begin(ServeSettings, int(sys.argv[1]))
    secrets = [*settings.api_keys, *settings.admin_keys]
    configure_logging(settings.log_format, settings.log_level, secrets)
    try:
        opened = open_all(settings)
    except QuireError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return BAD_INPUT
    _allow_many_files()
    run: Any = asyncio.run
    try:
        import uvloop
    except ImportError:
        pass
    else:
        run = uvloop.run
    try:
        return int(run(_serve(settings, opened)))
    except BadRequest as error:  # a store that cannot be used
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return BAD_INPUT


class Opened(NamedTuple):
    """The text side of one model."""

    settings: ServeSettings
    tokenizer: Tokenizer
    card: ModelCard
    verdict: Verdict | None

    @staticmethod
    def of(settings: ServeSettings) -> Opened:
        tokenizer, verdict = open_tokenizer(settings.engine), open_verdict(settings.engine)
        card = open_card(settings.engine)
        if settings.chat_template is not None:
            tokenizer = tokenizer.with_chat_template(settings.chat_template)
        check_templates(tokenizer)
        return Opened(settings, tokenizer, card, verdict)


class AllOpened(NamedTuple):
    models: list[Opened]
    broken: dict[str, str]  # of several models those that cannot be read, and why


def open_all(settings: ServeSettings) -> AllOpened:
    """Raises QuireError when there is no model at all."""
    if not settings.models:
        return AllOpened([Opened.of(settings)], {})
    opened, broken = [], {}
    for index, own in enumerate(settings.models):
        folder = folder_of(settings, index)
        try:
            opened.append(Opened.of(settings.of_model(index, str(folder.path))))
        except QuireError as error:  # the others are none the worse
            broken[own.name] = " ".join(str(error).split())
            folder.ask("unload")
            log_event("model_failed", severity=logging.ERROR, name=own.name, reason=str(error))
    if not opened:
        raise CheckpointError("; ".join(f"{name}: {why}" for name, why in broken.items()))
    return AllOpened(opened, broken)


def check_templates(tokenizer: Tokenizer) -> None:
    """A chat template that cannot work is an error now, and not in the midst of a conversation.

    One that only refuses the message tried here may want a system message, or tools.
    """
    try:
        tokenizer.check_templates()
    except CheckpointError as error:
        why = str(error).rstrip(".")
        raise CheckpointError(f"{why}; give one that works with --chat-template FILE") from None
    if tokenizer.chat_template is None:
        return
    try:
        tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    except QuireError as error:
        log_event("chat_template_refuses_probe", severity=logging.WARNING, reason=str(error))


def _allow_many_files() -> None:
    """Each connection is a file; the usual soft limit of 1,024 is far below the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def build_servers(settings: ServeSettings, opened: AllOpened) -> list[Server]:
    """One for each model; what is stored, and who watches, is the first one's."""
    servers = [build_server(opened.models[0])]
    for other in opened.models[1:]:
        made = build_server(other._replace(settings=replace(other.settings, store_folder="")))
        made.shelf, made.watchman = servers[0].shelf, servers[0].watchman
        made.answers = cache_of(made)
        servers.append(made)
    if settings.models:
        folders = [ModelFolder(Path(server.settings.runtime_folder)) for server in servers]
        models = Models(servers, folders, opened.broken)
        if settings.auto is not None:
            models.choose_by(settings.auto)
    return servers


def build_server(opened: Opened) -> Server:
    """Composition root of this process, for one model."""
    settings = opened.settings
    link = EngineLink(Path(settings.runtime_folder) / SOCKET, settings.stall_s)
    tracer = make_tracer(settings.otlp_traces_endpoint)
    server = Server(settings, opened.tokenizer, link, tracer=tracer, verdict=opened.verdict)
    server.inside, server.card = Inside(server), opened.card
    limits = settings.limits
    if settings.store_folder:
        bounds = Bounds(limits.stored_s, limits.max_stored_bytes_per_key)
        server.shelf = Shelf(Path(settings.store_folder), bounds)
    server.answers = cache_of(server)
    if settings.api_processes > 1:
        server.siblings = Siblings(server, server.abort)
        server.siblings.restore()
    return server


async def _serve(settings: ServeSettings, opened: AllOpened) -> int:
    servers = build_servers(settings, opened)
    server = servers[0]
    for one in servers:
        one.link.on_hello.append(partial(_banner, one.settings, one))
    app = App(server, routes(settings))
    http = make_http_server(settings, app)
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_on_loop_error)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    # None of these ever ends by itself: one that does leaves half a server, which is worse than
    # none. The supervisor starts a whole one.
    tasks = {
        asyncio.ensure_future(http.serve()): "http server",
        **{asyncio.ensure_future(one.link.run()): "engine link" for one in servers},
        asyncio.ensure_future(server.watchman.run()): "watchman",
    }
    for one in servers:
        if one.answers is not None and settings.answer_cache != "exact":
            tasks[asyncio.ensure_future(one.answers.similar.embedder.run())] = "embeddings"
    if server.models is not None:
        tasks[asyncio.ensure_future(server.models.run())] = "models"
    if server.shelf is not None:
        runner = BatchRunner(server, server.shelf, batch_handlers())
        tasks[asyncio.ensure_future(runner.run())] = "batches"
        later = BackgroundResponses(server, server.shelf, make_response)
        tasks[asyncio.ensure_future(later.run())] = "responses in the background"
    if server.siblings is not None:
        tasks[asyncio.ensure_future(server.siblings.run())] = "siblings"
    _settle_memory()
    stopping = asyncio.ensure_future(_until(stop))
    done, _ = await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
    for task in done - {stopping}:
        log_event("ended", severity=logging.ERROR, what=tasks[task], error=repr(task.exception()))
        return FAILED
    await _drain(servers, settings.drain_s, hurry)
    stop_http_server(http)
    await asyncio.wait(tasks, timeout=STOP_S, return_when=asyncio.FIRST_COMPLETED)
    for one in servers:
        await one.aclose()
    if server.siblings is not None:
        server.siblings.save()
    # Idle connections would keep some servers waiting; everything that matters is done.
    with suppress(OSError):  # the terminal may be gone
        sys.stdout.flush()
    os._exit(0)


def _settle_memory() -> None:
    """What start-up made lives as long as the process: no full collection shall walk it again,
    which takes tens of milliseconds in the middle of everybody's answers."""
    gc.collect()
    gc.freeze()


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What a task left behind that nobody waits for; one line, as everything else."""
    error = context.get("exception")
    trace = "" if error is None else "".join(traceback.format_exception(error))
    log_event("loop_error", severity=logging.ERROR, what=context["message"], traceback=trace)


async def _until(event: asyncio.Event) -> None:
    await event.wait()


async def _drain(servers: Sequence[Server], seconds: float, hurry: asyncio.Event) -> None:
    """Let what runs finish, until the deadline or a second signal; tell the rest why it ends."""

    def num_open() -> int:
        return sum(server.admission.num_open for server in servers)

    for server in servers:
        server.is_draining = True
    deadline = time.monotonic() + seconds
    while num_open() and time.monotonic() < deadline and not hurry.is_set():
        await asyncio.sleep(POLL_S)
    for generation in list(servers[0].watchman.generations):
        generation.tap.fail(Problem(503, "the server is shutting down", code="draining"))
    await asyncio.sleep(POLL_S)
    # Else there was nothing to drain: no model, no requests.
    if any(server.link.num_restarts >= 0 for server in servers):
        log_event("drained", unfinished=num_open())


# ------------------------------------------------------------ banner


def _own_decisions(settings: ServeSettings) -> list[Decision]:
    """What was chosen on this side of the socket."""
    sampling = ", ".join(f"{name} {value:g}" for name, value in settings.default_sampling.items())
    if not sampling:
        return []
    why = "the model's makers recommend it; used where a request is silent"
    return [Decision("sampling", sampling, why)]


def _banner(settings: ServeSettings, server: Server, hello: Hello) -> None:
    """One table of what was decided and why, and where to go; on the first start only."""
    is_first = server.link.num_restarts == 0 and settings.api_index == 0
    if not is_first or settings.log_format == "json":
        return
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    url = f"http://{host}:{settings.port}"
    decisions = [*hello.decisions, *_own_decisions(settings)]
    width = max(len(d.what) for d in decisions)
    value_width = min(44, max(len(d.value) for d in decisions))
    rows = [f"  {d.what:<{width}}  {d.value:<{value_width}}  {d.why}" for d in decisions]
    name = server.model_names[0]
    path, body = "/v1/chat/completions", '{"messages": [{"role": "user", "content": "Hello"}]}'
    if server.verdict is not None:
        path, body = "/classify", '{"input": ["Hello"]}'
    example = f"curl {url}{path} -H 'content-type: application/json' \\\n    -d '{body}'"
    page = f"\n  page     {url}/" if settings.page else ""
    with suppress(OSError):  # nobody may be reading
        print(
            f"\n{name} ({hello.architecture}) ready in {hello.load_seconds:.1f} s\n\n"
            + "\n".join(rows)
            + f"\n{page}\n  OpenAI   {url}/v1\n  metrics  {url}/metrics\n\n  {example}\n",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
