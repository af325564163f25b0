"""/v1/answer_cache: what a caller has in the cache of answers, and a way to forget it."""

from __future__ import annotations

from quire.server import sse
from quire.server.answer_cache import AnswerCache
from quire.server.files import tenant_of
from quire.server.http import HttpRequest, Reply
from quire.server.problems import Problem
from quire.server.server import Server


async def cached_answers(request: HttpRequest, server: Server) -> Reply:
    """GET /v1/answer_cache: how many entries, how often they were used, how large they are."""
    answers = _answers(server)
    found = await answers.entries.summary(tenant_of(request))
    most, error = answers.entries.keeping.max_entries, answers.max_error
    shown = {"mode": server.settings.answer_cache, "max_entries": most, "max_error": error}
    return Reply(sse.encode({"object": "answer_cache", **shown, **found}))


async def forget_answers(request: HttpRequest, server: Server) -> Reply:
    """DELETE /v1/answer_cache: all of the caller's."""
    count = await _answers(server).entries.forget(tenant_of(request))
    return Reply(sse.encode({"object": "answer_cache.deleted", "deleted": count}))


def _answers(server: Server) -> AnswerCache:
    if server.answers is None:
        raise Problem(404, "no answers are cached here: start the server with --answer-cache")
    return server.answers
