"""Origins: what other sites' pages may do with this server through a visitor's browser.

CORS is off unless origins are listed. That alone does not keep a page from *sending*: a browser
posts plain text anywhere unasked, and a name that suddenly means 127.0.0.1 makes a stranger's page
one of ours. A server with keys does not mind, for pages do not know them; a server without keys
refuses what a browser says comes from elsewhere.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from quire.server.http import HttpRequest, Reply
from quire.server.problems import Problem
from quire.server.server import Server
from quire.server.settings import ServeSettings, is_address


def cors_headers(request: HttpRequest, server: Server) -> list[tuple[bytes, bytes]]:
    origin = request.headers.get("origin", "")
    allowed = server.settings.cors_origins
    if not origin or not (origin in allowed or "*" in allowed):
        return []
    return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]


def preflight(request: HttpRequest, server: Server) -> Reply:
    if not cors_headers(request, server):
        return Reply(b"", 403)
    return Reply(
        b"",
        204,
        headers=(
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (b"access-control-allow-headers", b"authorization, content-type, x-api-key"),
        ),
    )


def check_browser(request: HttpRequest, server: Server) -> None:
    """Raises Problem 403 for what a page elsewhere makes a browser send to an open server."""
    if not server.keys.is_open or "*" in server.settings.cors_origins:
        return
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
    if origin is None and site in (None, "none"):  # no browser, or an address typed into one
        return
    if origin is not None and origin in server.settings.cors_origins:
        return
    if request.method == "GET" and request.headers.get("sec-fetch-mode") == "navigate":
        return  # a link was followed: nothing is changed, and the other page sees nothing of it
    host = request.headers.get("host", "")
    is_own = site in (None, "same-origin", "none") if origin is None else _host_of(origin) == host
    if not is_own or not _is_known_host(host, server.settings):
        raise Problem(
            403,
            f"refused a browser's request from {(origin or host)[:200]!r};"
            " allow it with --allowed-origins, or use a key",
        )


def _host_of(origin: str) -> str:
    return origin.partition("://")[2]


def _is_known_host(host: str, settings: ServeSettings) -> bool:
    """Addresses mean themselves; names only when they are ours, for anyone can name our address."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    known = {"localhost", settings.host, *(urlsplit(o).hostname for o in settings.cors_origins)}
    return name in known or is_address(name.strip("[]"))
