"""Admin verbs: act on the running engine. Behind the admin key where there is one."""

from __future__ import annotations

import msgspec

from quire.engine import commands as msg
from quire.errors import BadRequest
from quire.server import sse
from quire.server.http import HttpRequest, Reply
from quire.server.server import Server

MAX_PROFILE_STEPS = 1_000


async def flush_cache(request: HttpRequest, server: Server) -> Reply:
    """Forget cached prefixes."""
    pages = await server.link.ask(msg.Flush)
    return Reply(sse.encode({"pages_emptied": pages}))


async def cache_news(request: HttpRequest, server: Server) -> Reply:
    """How cached prefixes changed since a number that an earlier answer told; for routers."""
    since, epoch = request.query.get("since", "0"), request.query.get("epoch", "")
    if not (since.isascii() and since.isdigit() and len(since) < 20) or len(epoch) > 64:
        raise BadRequest(f"got since={since[:40]!r}, want a number", param="since")
    found = await server.link.ask(lambda number: msg.TellCache(number, epoch, int(since)))
    assert isinstance(found, dict)
    return Reply(sse.encode({**found, "is_whole": bool(found["is_whole"])}))


async def pause(request: HttpRequest, server: Server) -> Reply:
    """No step until resumed; requests keep waiting, and /ready says so."""
    await server.link.set_paused(True)
    return Reply(sse.encode({"status": "paused"}))


async def resume(request: HttpRequest, server: Server) -> Reply:
    await server.link.set_paused(False)
    return Reply(sse.encode({"status": "running"}))


async def abort(request: HttpRequest, server: Server) -> Reply:
    """End one request by the id its answer carries, or all of them with {"all": true}."""
    wanted = _body(request)
    everyone, name = wanted.get("all") is True, wanted.get("request_id")
    if not everyone and not isinstance(name, str):
        raise BadRequest("want request_id, a string, or all=true", param="request_id")
    target = None if everyone else str(name)
    number = server.abort(target)
    if server.siblings is not None:
        number += await server.siblings.abort(target)
    return Reply(sse.encode({"aborted": number}))


async def profile(request: HttpRequest, server: Server) -> Reply:
    """Record the next steps, fewer if the work ends; the trace is written where the engine runs.

    An engine that is idle or paused has none: 409, at once.
    """
    steps = _body(request).get("num_steps", 20)
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= MAX_PROFILE_STEPS:
        raise BadRequest(
            f"got num_steps={steps!r}, want 1 to {MAX_PROFILE_STEPS}", param="num_steps"
        )
    found = await server.link.ask(lambda number: msg.Profile(number, steps))
    return Reply(sse.encode(found))


def _body(request: HttpRequest) -> dict[str, object]:
    if not request.body:
        return {}
    try:
        return msgspec.json.decode(request.body, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise BadRequest(f"want a JSON object: {str(error)[:200]}") from None
