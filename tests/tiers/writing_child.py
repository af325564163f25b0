"""Writes nodes to a folder until it is killed; says on stdout how many it believes are written."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.tiers.nodes import data_of, node, open_shelf


def main() -> None:
    folder, first = Path(sys.argv[1]), int(sys.argv[2])
    shelf = open_shelf(folder, limit=1 << 24)
    for number in range(first, first + 100_000):
        assert shelf.write(node(number), data_of(number))
        print(number - first + 1, flush=True)


if __name__ == "__main__":
    main()
