"""The router's counts as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Sequence

from quire.router.upstream import Upstream

NAMES = (
    ("requests_total", "counter", "requests", "Requests sent to the upstream."),
    ("failures_total", "counter", "failures", "Requests it did not answer, or broke off."),
    ("open_requests", "gauge", "open_requests", "Requests it has from us."),
    ("prompt_tokens_total", "counter", "prompt_tokens", "Tokens of prompts sent."),
    ("cached_tokens_total", "counter", "cached_tokens_expected", "Of them, expected cached."),
    ("known_prefix_pages", "gauge", "known_prefix_pages", "Pages known to be in its cache."),
    ("resyncs_total", "counter", "resyncs", "Times its whole cache was listed."),
)


def metrics_text(upstreams: Sequence[Upstream], num_retried: int) -> bytes:
    shapes = [(_label(one.name), one.shape(0.0), one.is_usable()) for one in upstreams]
    lines = []
    for name, kind, field, help in NAMES:
        lines += [f"# HELP quire_router:{name} {help}", f"# TYPE quire_router:{name} {kind}"]
        lines += [f"quire_router:{name}{{{label}}} {shape[field]}" for label, shape, _ in shapes]
    lines += ["# HELP quire_router:up Whether it gets requests.", "# TYPE quire_router:up gauge"]
    lines += [f"quire_router:up{{{label}}} {int(is_up)}" for label, _, is_up in shapes]
    lines += [
        "# HELP quire_router:retries_total Requests sent to one more upstream.",
        "# TYPE quire_router:retries_total counter",
        f"quire_router:retries_total {num_retried}",
    ]
    return ("\n".join(lines) + "\n").encode()


def _label(name: str) -> str:
    safe = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'upstream="{safe}"'
