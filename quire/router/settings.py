"""RouterSettings: everything `quire router` may be told. Plain values, checked when made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from quire.errors import BadRequest

Policy = Literal["prefix", "least-loaded", "round-robin"]
POLICIES: tuple[Policy, ...] = ("prefix", "least-loaded", "round-robin")

MANY = "dns+"


@dataclass(frozen=True, slots=True)
class UpstreamAddress:
    """A server behind the router."""

    name: str
    host: str
    port: int
    is_tls: bool = False
    base: str = ""  # path before the server's own, without a slash at its end
    is_many: bool = False  # a server behind each address of the host's name
    behind: str = ""  # the name that this address was found behind

    @staticmethod
    def parse(text: str) -> UpstreamAddress:
        """`URL`, `NAME=URL`, or `dns+URL` for all addresses of a name. Raises BadRequest."""
        name, found, url = text.partition("=")
        if not found or "://" in name:
            name, url = "", text
        is_many = url.startswith(MANY)
        parts = urlsplit(url.removeprefix(MANY))
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or not port:
            raise BadRequest(
                f"got upstream {text!r}, want http://HOST:PORT, NAME=http://HOST:PORT"
                " or dns+http://NAME:PORT"
            )
        if is_many and parts.scheme == "https":
            raise BadRequest(
                f"got upstream {text!r}: servers behind a name are called by their addresses, and"
                " certificates are for names; use dns+http, or one https URL for each server"
            )
        if parts.query or parts.fragment:
            raise BadRequest(f"got upstream {text!r}, want a URL without a query")
        given = name or f"{parts.hostname}:{port}"
        base = parts.path.rstrip("/")
        return UpstreamAddress(
            given, parts.hostname, port, parts.scheme == "https", base, is_many=is_many
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    upstreams: tuple[UpstreamAddress, ...]
    prefill: tuple[UpstreamAddress, ...] = ()  # engines that compute prompts for the others
    host: str = "127.0.0.1"
    port: int = 8000
    http_server: str = "granian"  # or "uvicorn"
    policy: Policy = "prefix"
    tokenizer: str = ""  # model whose tokenizer names prefixes; "": they are named by their text
    chat_template: str | None = None  # text of a template that replaces the model's
    is_transparent: bool = False  # everything is passed on, the router's own paths too
    admin_key: str = ""  # of the upstreams, and of the router's own verbs
    public_metrics: bool = False  # for whoever has no key
    share_prefix_cache: bool = False  # as the upstreams were told
    attempts: int = 3  # upstreams tried for one request
    connect_s: float = 2.0
    head_s: float = 600.0  # to the first byte of an answer
    watch_s: float = 0.25  # between looks at an upstream
    drain_s: float = 30.0
    log_format: Literal["auto", "text", "json"] = "auto"
    log_level: str = "info"

    def __post_init__(self) -> None:
        names = [one.name for one in (*self.upstreams, *self.prefill)]
        for name in names:
            if names.count(name) > 1:
                raise BadRequest(f"two upstreams are called {name!r}; name them with NAME=URL")
