"""Drafter: what a model that makes drafts gives the runner it drafts for; see `drafter.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from quire.step import Admission, Work


class Drafter(Protocol):
    def admit(self, admissions: Sequence[Admission]) -> None:
        """These rows have other requests, or other pages, from now on."""
        ...

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """The target's pages are copied so."""
        ...

    def fill(self, works: Sequence[Work]) -> None:
        """Write the drafts of these works into their rows, behind their newest tokens."""
        ...
