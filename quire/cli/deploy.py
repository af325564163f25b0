"""quire deploy: replicas of a server on Ray Serve. Only flags live here; see `deploy/`.

Whatever is not a flag of this verb is one of `quire serve`, which each replica starts.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from quire.cli.parser import VerbParser, positive, whole
from quire.cli.replicas import MAX_REPLICAS
from quire.cli.serve import build_parser as serve_parser
from quire.cli.serve import seconds
from quire.cli.serve import settings_of as serve_settings_of
from quire.errors import BadRequest

EXAMPLES = """
quire deploy MODEL --max-replicas 4                       on this machine, until Ctrl-C
quire deploy MODEL --address auto --host 0.0.0.0 --api-key-file /etc/quire/keys --gpus 1
quire deploy OTHER --address auto --name chat --route /chat       one application for each model
quire deploy MODEL --address auto --name chat --max-num-seqs 64   again: a rolling update
quire deploy --address auto --name chat --delete
"""
# They would be told to everybody who may look at the cluster.
SECRETS = ("--api-key", "--admin-api-key")
OURS = ("--replicas",)
MAX_PERCENT = 100


class DeployParser(VerbParser):
    passes_on = True


def build_parser() -> VerbParser:
    parser = DeployParser(
        "deploy", "Serve a model with Ray Serve.", EXAMPLES, "[MODEL] [options of quire serve]"
    )
    add = parser.add_argument
    add("--address", default="", metavar="ADDRESS", help="of a Ray cluster, or auto; else local")
    add("--name", default="quire", help="of the application (default: quire)")
    add("--route", default="/", metavar="PATH", help="where it answers (default: /)")
    add("--host", default="127.0.0.1", help="address on which Ray listens")
    add("--port", type=whole(1, 65_535), default=8000, help="port (default: 8000)")
    add("--delete", action="store_true", help="end the application; what runs may finish")
    add = parser.add_argument_group("replicas").add_argument
    add("--min-replicas", type=whole(1, MAX_REPLICAS), default=1, metavar="N")
    add("--max-replicas", type=whole(1, MAX_REPLICAS), default=1, metavar="N")
    add(
        "--target-requests",
        type=positive,
        default=16,
        metavar="N",
        help="open requests that one replica should have (default: 16)",
    )
    add(
        "--target-ttft",
        type=seconds,
        default=0.0,
        metavar="S",
        help="add replicas while more than 5 %% of first tokens come later",
    )
    add("--upscale-delay", type=seconds, default=10.0, metavar="S", help="default: 10")
    add("--downscale-delay", type=seconds, default=300.0, metavar="S", help="default: 300")
    add(
        "--surge",
        type=whole(0, MAX_PERCENT),
        default=25,
        metavar="PERCENT",
        help="replicas of an update that start beside the old ones; 0 where there is no room for"
        " them (default: 25)",
    )
    add(
        "--drain-timeout", type=seconds, default=120.0, metavar="S", help="to finish (default: 120)"
    )
    add("--cpus", type=positive, default=1, metavar="N", help="of each replica (default: 1)")
    add("--gpus", type=whole(0, MAX_REPLICAS), default=0, metavar="N", help="of each (default: 0)")
    return parser


def run(args: Namespace) -> int:
    settings = settings_of(args)
    from quire.deploy.ray_serve import delete, deploy

    return delete(settings) if args.delete else deploy(settings)


def settings_of(args: Namespace) -> Any:
    from quire.deploy.settings import DeploySettings
    from quire.server.settings import is_loopback

    for word in args.words:
        flag = word.partition("=")[0]
        if flag in SECRETS:
            raise BadRequest(
                f"got {flag}: whoever may look at the cluster would see it; give --api-key-file, or"
                " set QUIRE_API_KEY where Ray's nodes are started"
            )
        if flag in OURS:
            raise BadRequest(f"got {flag}; Ray starts replicas: give --max-replicas")
    words = list(args.words)
    if not args.gpus and "--threads" not in words:
        words += ["--threads", str(args.cpus)]
    if not args.delete:  # mistakes first, before a cluster is asked
        serve_settings_of(serve_parser().parse_args([*words, "--host", args.host]))
    return DeploySettings(
        words=tuple(words),
        name=args.name,
        route=args.route,
        address=args.address,
        host=args.host,
        needs_key=not is_loopback(args.host) and "--allow-unauthenticated" not in words,
        port=args.port,
        min_replicas=args.min_replicas,
        max_replicas=max(args.max_replicas, args.min_replicas),
        target_requests=float(args.target_requests),
        target_ttft_s=args.target_ttft,
        upscale_delay_s=args.upscale_delay,
        downscale_delay_s=args.downscale_delay,
        surge_percent=args.surge,
        drain_s=args.drain_timeout,
        num_cpus=float(args.cpus),
        num_gpus=float(args.gpus),
    )
