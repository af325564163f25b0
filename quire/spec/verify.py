"""The rule of speculation: the target draws its own token everywhere, and drafts only save steps.

A draw depends on the logits and on noise keyed by (seed, position). A step with drafts draws, after
the newest token and after each draft, the token that the target would draw there anyway. As long as
draws equal drafts, the next draft was fed in its right place and the next draw counts too. So what
comes out is what would come out without drafts, bit for bit, at any temperature and depth. There is
no other rule here.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.spec.tree import Parents, children_of


def verified(drawn: Sequence[int], drafts: Sequence[int]) -> Sequence[int]:
    """The draws that count: those equal to their drafts, and the first one after them.

    `drawn` has one token more than `drafts`: drawn[i] is what follows drafts[:i].

    >>> verified([5, 6, 9, 1], [5, 6, 7])
    [5, 6, 9]
    """
    for count, (token, draft) in enumerate(zip(drawn, drafts, strict=False), 1):
        if token != draft:
            return drawn[:count]
    return drawn


def num_right(drawn: Sequence[int], drafts: Sequence[int]) -> int:
    """How many drafts, from the first on, were drawn.

    >>> num_right([5, 6, 9], [5, 6, 7, 8])
    2
    """
    for count, (token, draft) in enumerate(zip(drawn, drafts, strict=False)):
        if token != draft:
            return count
    return min(len(drawn), len(drafts))


def verified_path(drawn: Sequence[int], drafts: Sequence[int], parents: Parents) -> list[int]:
    """The same for a tree: the nodes whose draws count, from the newest known token on.

    drawn[i] is what follows node i, and drafts[i - 1] is node i itself. Of the drafts that follow a
    node, the one that equals its draw is the next.

    >>> verified_path([6, 1, 8, 1], [5, 6, 8], (0, 0, 2))
    [0, 2, 3]
    """
    children, nodes = children_of(parents), [0]
    while True:
        token = drawn[nodes[-1]]
        following = [node for node in children[nodes[-1]] if drafts[node - 1] == token]
        if not following:
            return nodes
        nodes.append(following[0])
