"""quire join: this machine's ranks of a model that the first machine serves.

It asks the first machine which ranks are its own and starts them. When those end, because the first
machine's engine did, it asks again: a server that starts its engine anew finds everybody there.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from quire.cli.parser import VerbParser, positive
from quire.cli.show import note
from quire.errors import BadRequest

if TYPE_CHECKING:
    from quire.config import Parallel

EXAMPLES = """
quire join --master-addr 10.0.0.1 --nnodes 2 --node-rank 1
quire join --master-addr 10.0.0.1 --nnodes 2 --node-rank 1 --model /models/qwen --once
"""


def build_parser() -> VerbParser:
    parser = VerbParser("join", "Hold a part of a model that another machine serves.", EXAMPLES)
    add = parser.add_argument
    add("--master-addr", metavar="HOST", required=True, help="where the first machine listens")
    add("--master-port", type=positive, metavar="N", default=29501, help="(default: 29501)")
    add("--nnodes", type=positive, metavar="N", default=2, help="machines, the first one included")
    add("--node-rank", type=positive, metavar="N", default=1, help="which one this is, from 1 on")
    add("--rank-secret", metavar="FILE", help="the file that all machines have in common")
    add(
        "--distributed-timeout-seconds",
        type=positive,
        metavar="N",
        help="how long to wait for the first machine (default: 300)",
    )
    add("--model", "-m", metavar="MODEL", help="where it is here (default: where the first has it)")
    add("--once", action="store_true", help="end when the first machine's engine does")
    return parser


def run(args: Namespace) -> int:
    from quire.config import Parallel

    if args.node_rank >= args.nnodes:
        raise BadRequest(f"got --node-rank {args.node_rank} of --nnodes {args.nnodes}")
    asked = Parallel(
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        master_addr=args.master_addr,
        master_port=args.master_port,
        rank_secret=args.rank_secret,
        distributed_timeout_seconds=args.distributed_timeout_seconds,
    )
    model = None
    if args.model is not None:
        from quire.cli.download import fetch

        model = str(fetch(args.model))
    while True:
        code = _take_part(asked, model)
        if args.once:
            return code


def _take_part(asked: Parallel, model: str | None) -> int:
    """Until our ranks end; raises RankLost when nobody wants them."""
    import msgspec

    from quire.dist.launch import run_together
    from quire.engine.joined_rank import Told
    from quire.engine.rank_nodes import come

    link, ranks = come(asked, None)
    link.close()
    note(f"ranks {', '.join(map(str, ranks))} join {asked.master_addr}:{asked.master_port}")
    told = [msgspec.json.encode(Told(asked, rank, model)).decode() for rank in ranks]
    return run_together("quire.engine.joined_rank", told)
