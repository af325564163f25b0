"""Looks: in which steps to look whether drafts pay, of one request or of all.

While drafts are right every step looks. After several looks in vain the next ones come in one step
of 8, then of 16, and so on. They fall on multiples of these numbers, so those of several requests
fall together. A right draft brings every step back.
"""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE = 8  # looks in a row that may fail before they become rare
TRIAL = 2  # steps in a row that a rare look takes where drafts promise to pay
FIRST, LAST = 8, 64  # steps from one rare look to the next, at first and at most
# Looks that count as one in vain: those without a guess, which cost less, and those whose drafts
# were wrong, which what is counted of drafts (`survival.py`) knows of as well.
SILENT, WRONG = 4, 2


@dataclass(slots=True)
class Looks:
    """
    >>> looks = Looks(left=0, every=8)
    >>> [step for step in range(1, 40) if looks.is_due(step) and not looks.miss()]
    [8, 16, 32]
    """

    every: int = 1
    left: float = PATIENCE  # looks in vain that every step still looks for
    most: int = LAST

    @property
    def is_eager(self) -> bool:
        return self.left > 0

    def is_due(self, step: int) -> bool:
        return self.left > 0 or step % self.every == 0

    def hit(self) -> None:
        """A draft was right."""
        self.every, self.left = 1, PATIENCE

    def miss(self) -> None:
        """No draft would pay."""
        self._fail(1.0, FIRST, self.most)

    def wrong(self) -> None:
        """Drafts were fed, and none was right."""
        self._fail(1 / WRONG, FIRST, self.most)

    def nothing(self) -> None:
        """There was no guess."""
        self._fail(1 / SILENT, 1, FIRST)

    def promise(self) -> None:
        """Drafts would pay now, by what is known."""
        if self.left == 0:
            self.left = TRIAL

    def soon(self, most: int) -> None:
        """Something changed: look within so many steps."""
        self.every = min(self.every, most)

    def _fail(self, weight: float, first: int, most: int) -> None:
        self.left = max(0.0, self.left - weight)
        if self.left == 0:
            self.every = max(self.every, min(max(first, 2 * self.every), most))
