"""Trees of drafts: several guesses at one position, each with guesses behind it.

A tree is a tuple of parents. Node 0 is the newest known token, nodes 1, 2, ... are the drafts, and
`parents[i]` is the node that draft i + 1 follows, one with a smaller number. So the first drafts of
a tree are a tree themselves, and a chain is (0, 1, 2, ...), for which plans write ().
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

Parents = tuple[int, ...]


@lru_cache(maxsize=1024)
def paths_of(parents: Parents) -> tuple[tuple[int, ...], ...]:
    """For each node the drafts on the way to it, itself included.

    >>> paths_of((0, 0, 1))
    ((), (1,), (2,), (1, 3))
    """
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(parents, 1):
        assert 0 <= parent < node, f"node {node} before its parent {parent}"
        paths.append((*paths[parent], node))
    return tuple(paths)


@lru_cache(maxsize=1024)
def children_of(parents: Parents) -> tuple[tuple[int, ...], ...]:
    """For each node those that follow it.

    >>> children_of((0, 0, 1))
    ((1, 2), (3,), (), ())
    """
    found: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents, 1):
        found[parent].append(node)
    return tuple(map(tuple, found))


def is_chain(parents: Iterable[int]) -> bool:
    return all(parent == node for node, parent in enumerate(parents))
