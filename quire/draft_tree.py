"""Which of a drafter's guesses are followed: trees of ranks, as vLLM's `speculative_token_tree`.

A guess is named by the ranks on the way to it: (0,) is the likeliest next token, (1,) the second
likeliest, (1, 0) the likeliest behind that. What the likeliest is, the drafter says when it comes
to it. A tree is a tuple of such names, the most promising first; whatever leads to a name, and its
smaller ranks, come before it. Torch-free. `spec/tree.py` has trees of drafts as steps feed them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from heapq import heappop, heappush

from quire.errors import NotSupported

Ranks = tuple[int, ...]
TokenTree = tuple[Ranks, ...]

MAX_DRAFTS, MAX_WIDTH = 64, 8
# Of a guess by its rank, given that those before it were right, where counting begins.
CHANCES = (0.7, 0.15, 0.06, 0.03, 0.02, 0.01, 0.01, 0.01)
LONGEST = 1 << 14  # characters of a tree that are read at all


def chance_of(ranks: Ranks) -> float:
    """Of the last one, given those before it."""
    return CHANCES[ranks[-1]]


def survival_of(ranks: Ranks) -> float:
    product = 1.0
    for rank in ranks:
        product *= CHANCES[rank]
    return product


def full_tree(width: int, levels: int, num: int) -> TokenTree:
    """The `num` most promising guesses where every guess has `width` behind it.

    >>> full_tree(2, 3, 4)
    ((0,), (0, 0), (0, 0, 0), (1,))
    """
    waiting: list[tuple[float, Ranks]] = []
    found: list[Ranks] = []
    ranks: Ranks = ()
    while len(found) < num:
        for rank in range(width if len(ranks) < levels else 0):
            following = (*ranks, rank)
            heappush(waiting, (-survival_of(following), following))
        if not waiting:
            break
        _, ranks = heappop(waiting)
        found.append(ranks)
    return tuple(found)


def parse_token_tree(given: object) -> TokenTree:
    """vLLM's string, or the same as lists. Raises NotSupported."""
    read = given
    if isinstance(given, str) and len(given) <= LONGEST:
        try:
            read = ast.literal_eval(given)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            read = None
    if not isinstance(read, (list, tuple)) or not 0 < len(read) <= MAX_DRAFTS:
        raise _unread(given, f"want a list of 1 to {MAX_DRAFTS} paths such as '[(0,), (1,)]'")
    names = {_ranks(name, given) for name in read}
    for name in names:
        before = {name[:-1], (*name[:-1], name[-1] - 1)} - {(), (*name[:-1], -1)}
        if missing := sorted(before - names):
            raise _unread(given, f"{name} is there and {missing[0]} is not; add it")
    return tuple(sorted(names, key=lambda name: (-survival_of(name), name)))


def _ranks(name: object, given: object) -> Ranks:
    if isinstance(name, (list, tuple)) and name:
        ranks = tuple(rank for rank in name if type(rank) is int and 0 <= rank < MAX_WIDTH)
        if len(ranks) == len(name):
            return ranks
    raise _unread(given, f"{name!r} is no path of ranks from 0 to {MAX_WIDTH - 1}")


def _unread(given: object, why: str) -> NotSupported:
    text = repr(given)
    text = text if len(text) <= 80 else text[:77] + "..."
    return NotSupported(f"got speculative_config.speculative_token_tree={text}: {why}")


def parents_of(tree: Iterable[Ranks]) -> tuple[int, ...]:
    """The node that each draft of a tree follows; 0 is the newest known token.

    >>> parents_of(((0,), (0, 0), (1,)))
    (0, 1, 0)
    """
    places: dict[Ranks, int] = {(): 0}
    parents: list[int] = []
    for node, ranks in enumerate(tree, 1):
        parents.append(places[ranks[:-1]])
        places[ranks] = node
    return tuple(parents)
