"""POST /admin/models/{load,park,unload}: what an operator may ask of one of several models."""

from __future__ import annotations

import msgspec

from quire.server import sse
from quire.server.fields import decode
from quire.server.http import HttpRequest, Reply
from quire.server.model_files import Wish
from quire.server.problems import Problem
from quire.server.server import Server


class ModelFields(msgspec.Struct):
    model: str


async def load_model(request: HttpRequest, server: Server) -> Reply:
    return _ask(request, server, "load")


async def park_model(request: HttpRequest, server: Server) -> Reply:
    """Its weights go, once its requests have ended; the next one brings them back."""
    return _ask(request, server, "park")


async def unload_model(request: HttpRequest, server: Server) -> Reply:
    """Its process goes, once its requests have ended."""
    return _ask(request, server, "unload")


def _ask(request: HttpRequest, server: Server, wish: Wish) -> Reply:
    fields = decode(request, ModelFields)
    if server.models is None:
        raise Problem(400, "this server has one model, which stays; give `quire serve` several")
    folder = server.models.folder(fields.model)
    folder.ask(wish)
    return Reply(sse.encode({"model": fields.model, "asked": wish, "was": folder.read().state}))
