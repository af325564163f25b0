"""SuffixAutomaton: every run of tokens of a text, and what followed it how often. Grows by tokens.

A state stands for all runs that end at the same places; a run's state is found by following its
tokens from the start. At most two states for each token, and constant time to add one. The link of
a state leads to the longest of its suffixes that also ends somewhere else.
"""

from __future__ import annotations

from collections.abc import Iterable

COUNTED = 64  # links along which an occurrence is counted; more only where one token repeats


class SuffixAutomaton:
    """
    >>> text = SuffixAutomaton([7, 8, 9, 7, 8, 9])
    >>> state, length = text.follow(*text.follow(0, 0, 7), 8)
    >>> length, text.continued(state)
    (2, (9, 1.0))
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]  # of the longest run of a state
        self.count = [0]  # places where it ends
        self.last = 0
        self.num_tokens = 0
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        following, link, length, count = self.next, self.link, self.length, self.count
        new, state = len(following), self.last
        following.append({})
        length.append(length[state] + 1)
        count.append(1)
        link.append(0)
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = link[state]
        link[new] = self._target(state, token)
        self.last = new
        self.num_tokens += 1
        state = link[new]
        for _ in range(COUNTED):
            if state <= 0:
                break
            count[state] += 1
            state = link[state]

    def _target(self, state: int, token: int) -> int:
        """The state of the longest suffix seen before: `state` and `token`, by itself."""
        if state < 0:
            return 0
        following, link, length = self.next, self.link, self.length
        reached = following[state][token]
        if length[reached] == length[state] + 1:
            return reached
        # Longer runs share that state; those up to here end at one place more from now on.
        split = len(following)
        following.append(dict(following[reached]))
        link.append(link[reached])
        length.append(length[state] + 1)
        self.count.append(self.count[reached])
        link[reached] = split
        while state >= 0 and following[state].get(token) == reached:
            following[state][token] = split
            state = link[state]
        return split

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """From a run of another text, the longest of its ends with `token` that is in this one."""
        while state > 0 and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        reached = self.next[state].get(token)
        if reached is None:
            return 0, 0
        return self.settled(reached, length + 1)

    def settled(self, state: int, length: int) -> tuple[int, int]:
        """The state of a run of this length, which may have been split since."""
        while state > 0 and self.length[self.link[state]] >= length:
            state = self.link[state]
        return state, length

    def continued(self, state: int) -> tuple[int, float] | None:
        """The likeliest token after a run, and its share."""
        options = self.next[state]
        if not options:
            return None
        count = self.count
        token = max(options, key=lambda token: count[options[token]])
        return token, min(1.0, count[options[token]] / max(1, count[state]))
