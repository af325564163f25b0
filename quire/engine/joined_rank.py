"""The process of a rank on another machine: come to the first rank, then be a rank like others.

`quire join` starts it (`cli/join.py`), with what it was told as one JSON object.
"""

from __future__ import annotations

import sys

import msgspec

from quire.config import Parallel
from quire.engine.rank_nodes import come
from quire.engine.rank_worker import serve
from quire.errors import RankLost


class Told(msgspec.Struct, frozen=True):
    asked: Parallel
    rank: int
    model: str | None = None


def main() -> int:
    told = msgspec.json.decode(sys.argv[1].encode(), type=Told)
    try:
        link, _ = come(told.asked, told.rank)
    except RankLost as error:
        print(f"rank {told.rank}: {error}", file=sys.stderr)
        return 1
    return serve(link, link.getsockname()[0], told.model)


if __name__ == "__main__":
    sys.exit(main())
