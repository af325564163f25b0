"""--replicas of `quire serve`: several whole servers here, a router at the address asked for."""

from __future__ import annotations

from argparse import Namespace, _ArgumentGroup
from typing import TYPE_CHECKING

from quire.cli.parser import whole

if TYPE_CHECKING:
    from quire.server.settings import ServeSettings

MAX_REPLICAS = 64


def add_replica_flag(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--replicas",
        type=whole(1, MAX_REPLICAS),
        default=1,
        metavar="N",
        help="whole servers on this machine, with a router in front (default: 1)",
    )


def run_replicas(
    args: Namespace, settings: ServeSettings, shares: tuple[tuple[str, ...], ...]
) -> int:
    """`shares`: the GPUs of each."""
    from quire.engine.usable_cpus import usable_cpus
    from quire.obs.log import configure_logging
    from quire.router.replicas import Replicas, admin_key_for
    from quire.router.settings import RouterSettings

    has_keys = bool(settings.api_keys or settings.admin_keys)
    admin_key = settings.admin_keys[0] if settings.admin_keys else admin_key_for(has_keys)
    configure_logging(settings.log_format, settings.log_level, [*settings.api_keys, admin_key])
    words = [*args.words, "--replicas", "1"]
    if not settings.engine.num_threads:  # they share the cores
        words += ["--threads", str(max(1, usable_cpus() // args.replicas))]
    router = RouterSettings(
        upstreams=(),
        host=settings.host,
        port=settings.port,
        http_server=settings.http_server,
        tokenizer=settings.engine.tokenizer or settings.engine.model,
        chat_template=settings.chat_template,
        admin_key=admin_key,
        public_metrics=settings.public_metrics,
        share_prefix_cache=settings.share_prefix_cache,
        drain_s=settings.drain_s,
        log_format=settings.log_format,
        log_level=settings.log_level,
    )
    return Replicas(shares, words, router).run()
