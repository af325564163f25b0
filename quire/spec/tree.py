"""Trees of drafts: several guesses at one position, each with guesses behind it.

A tree is a tuple of parents. Node 0 is the newest known token, nodes 1, 2, ... are the drafts, and
`parents[i]` is the node that draft i + 1 follows, one with a smaller number. So the first drafts of
a tree are a tree themselves, and a chain is (0, 1, 2, ...), for which plans write ().
"""

from __future__ import annotations

from collections.abc import Sequence
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


def survivals(chances: Sequence[float], parents: Parents) -> list[float]:
    """How likely each draft and all on the way to it are right, by chances given the parent.

    >>> survivals((0.5, 0.25, 0.5), (0, 0, 1))
    [0.5, 0.25, 0.25]
    """
    found = [1.0]
    for chance, parent in zip(chances, parents, strict=True):
        found.append(found[parent] * chance)
    return found[1:]


def chosen(nodes: Sequence[int], parents: Parents) -> Parents:
    """The tree of some drafts, each behind its parent, renumbered in their order.

    >>> chosen((2, 1, 4), (0, 0, 1, 2))
    (0, 0, 1)
    """
    places = {0: 0, **{node: place for place, node in enumerate(nodes, 1)}}
    return tuple(places[parents[node - 1]] for node in nodes)


@lru_cache(maxsize=1024)
def trunk_of(parents: Parents) -> frozenset[int]:
    """The first draft, the first that follows it, and so on.

    >>> sorted(trunk_of((0, 0, 1, 1, 2)))
    [1, 3]
    """
    children, found = children_of(parents), [0]
    while children[found[-1]]:
        found.append(children[found[-1]][0])
    return frozenset(found[1:])


def is_chain(parents: Parents) -> bool:
    return parents == tuple(range(len(parents)))
