"""The page at `/`: static files, read once, served with a policy that allows only themselves."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from quire.server.http import HttpRequest, Reply
from quire.server.problems import Problem
from quire.server.server import Server

TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = (
    (b"content-security-policy", b"default-src 'self'; img-src 'self' data:; connect-src 'self'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-cache"),
)


@cache
def _files() -> dict[str, bytes]:
    """All of them, by name: a request can only pick one of these, never a path."""
    folder = files("quire.server") / "page"
    return {
        item.name: item.read_bytes()
        for item in folder.iterdir()
        if item.name.rpartition(".")[2] in TYPES
    }


async def index(request: HttpRequest, server: Server) -> Reply:
    return _file("index.html", server)


async def asset(request: HttpRequest, server: Server) -> Reply:
    return _file(request.path_value, server)


def _file(name: str, server: Server) -> Reply:
    body = _files().get(name) if server.settings.page else None
    if body is None:
        raise Problem(404, f"no such file: {name[:100]}", code="not_found")
    return Reply(body, content_type=TYPES[name.rpartition(".")[2]], headers=HEADERS)
