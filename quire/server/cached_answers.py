"""/v1/answer_cache: what a caller has in the cache of answers, and a way to forget it."""

from __future__ import annotations

from quire.server import sse
from quire.server.answer_cache import AnswerCache
from quire.server.cache_wish import OFF
from quire.server.files import page_of, tenant_of
from quire.server.http import HttpRequest, Reply
from quire.server.problems import Problem
from quire.server.server import Server

LIMIT, MOST = 20, 100


async def cached_answers(request: HttpRequest, server: Server) -> Reply:
    """GET /v1/answer_cache: how many entries, how often they were used, how large they are; and
    the `limit` of them that were used last."""
    answers = server.answers
    if answers is None:
        return Reply(sse.encode({"object": "answer_cache", "mode": OFF, "entries": 0, "data": []}))
    tenant, count = tenant_of(request), page_of(request, LIMIT, MOST).limit
    found = await answers.entries.summary(tenant)
    keeping = answers.entries.keeping
    shown = {
        "mode": server.settings.answer_cache,
        "max_entries": keeping.max_entries,
        "max_bytes": keeping.max_bytes,
        "max_age_s": keeping.max_age_s,
        "max_error": answers.max_error,
        "data": await answers.entries.latest(tenant, count),
    }
    return Reply(sse.encode({"object": "answer_cache", **shown, **found}))


async def forget_answers(request: HttpRequest, server: Server) -> Reply:
    """DELETE /v1/answer_cache: all of the caller's."""
    count = await _answers(server).entries.forget(tenant_of(request))
    return Reply(sse.encode({"object": "answer_cache.deleted", "deleted": count}))


def _answers(server: Server) -> AnswerCache:
    if server.answers is None:
        raise Problem(404, "no answers are cached here: start the server with --answer-cache")
    return server.answers
