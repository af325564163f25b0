"""Survival: how likely a draft is right, from what became of earlier ones.

A proposer's own chance says which drafts are better than others; how good they are is counted. Two
counts are blended: of all requests' drafts with about this chance, and of this request's drafts.
Both fade, so what did not pay is tried again now and then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from quire.request import RequestId
from quire.spec.tree import Parents, children_of

EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.96, 0.98)
OWN_TRUST = 30.0  # drafts that a proposer's own chance counts for
OTHERS_TRUST = 10.0  # drafts that all requests' count for, beside one request's own
FADING = 0.995  # of a request's counts, with each of its steps
OTHERS_FADING = 0.999  # of everybody's, with each step
MOST = 256.0  # drafts in a count: the newest weigh most
SURE_WRONG = 1e-3  # nothing is less likely, nor its opposite
NONE, UNJUDGED = 0, -1  # in place of the draft that was right


@dataclass(slots=True)
class Count:
    tried: float = 0.0
    right: float = 0.0
    expected: float = 0.0  # to be right, by what was known of all requests' drafts

    def add(self, is_right: bool, expected: float = 0.0) -> None:
        if self.tried >= MOST:
            self.fade(1 - 1 / MOST)
        self.tried += 1
        self.right += is_right
        self.expected += expected

    def fade(self, factor: float) -> None:
        self.tried *= factor
        self.right *= factor
        self.expected *= factor

    def share(self, prior: float, trust: float) -> float:
        return (self.right + trust * prior) / (self.tried + trust)

    def better(self, trust: float) -> float:
        """By how much the odds of drafts are better than was expected of them."""
        if not self.tried:
            return 1.0
        mean = self.expected / self.tried
        return _odds(self.share(mean, trust)) / _odds(mean)


class Survival:
    def __init__(self) -> None:
        self._bins = [Count() for _ in range(len(EDGES) + 1)]
        self._requests: dict[RequestId, Count] = {}
        self._told: dict[float, float] = {}  # odds of a proposer's chance, in this step

    def chances(self, request_id: RequestId, own: tuple[float, ...]) -> list[float]:
        """The chance of each draft, given that those before it were right."""
        count = self._requests.get(request_id)
        better = 1.0 if count is None else count.better(OTHERS_TRUST)
        found = []
        for chance in own:
            odds = self._told.get(chance)
            if odds is None:
                odds = self._told[chance] = _odds(self._others(chance))
            found.append(better * odds / (1.0 + better * odds))
        return found

    def _others(self, chance: float) -> float:
        """What all requests' drafts with about this chance are worth."""
        return self._bins[_bin_of(chance)].share(chance, OWN_TRUST)

    def learn(self, request_id: RequestId, own: tuple[float, ...], num_accepted: int) -> None:
        """Drafts with these chances were fed: those behind the first wrong one were not judged."""
        self._told.clear()
        count = self._requests.setdefault(request_id, Count())
        for place, chance in enumerate(own[: num_accepted + 1]):
            is_right = place < num_accepted
            count.add(is_right, self._others(chance))
            self._bins[_bin_of(chance)].add(is_right)

    def tree_chances(
        self, request_id: RequestId, own: tuple[float, ...], parents: Parents
    ) -> list[float]:
        """The same for a tree, given the draft that each follows. What a request's first guesses
        are worth says nothing of its second ones: those go by everybody's."""
        found = self.chances(request_id, own)
        for siblings in children_of(parents):
            for before, node in pairwise(siblings):
                chance = own[node - 1]
                found[node - 1] = min(self._others(chance), found[before - 1])
        return found

    def learn_tree(
        self, request_id: RequestId, own: tuple[float, ...], parents: Parents, right: Sequence[int]
    ) -> None:
        """`right` are the drafts that were right, from the first on; -1 behind them: the request
        ended there, and nothing behind was judged."""
        self._told.clear()
        count = self._requests.setdefault(request_id, Count())
        children = children_of(parents)
        for parent, following in pairwise((0, *right, NONE)):
            if following == UNJUDGED:
                break
            for rank, node in enumerate(children[parent]):
                is_right = node == following
                if rank == 0:
                    count.add(is_right, self._others(own[node - 1]))
                self._bins[_bin_of(own[node - 1])].add(is_right)

    def fade(self, request_ids: list[RequestId]) -> None:
        """A step passed for these requests."""
        self._told.clear()
        for count in self._bins:
            count.fade(OTHERS_FADING)
        for request_id in request_ids:
            if (own := self._requests.get(request_id)) is not None:
                own.fade(FADING)

    def forget(self, request_id: RequestId) -> None:
        self._requests.pop(request_id, None)


def _bin_of(chance: float) -> int:
    return bisect_right(EDGES, chance)


def _odds(chance: float) -> float:
    chance = min(max(chance, SURE_WRONG), 1 - SURE_WRONG)
    return chance / (1 - chance)
