"""Drafter: what a model or a head that makes drafts gives the runner it drafts for.

`drafter.py` drafts with a model, `feature_drafter.py` and `medusa_drafter.py` with heads, which
read the target's hidden states: a step hands them over as a value (`states.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from quire.runner.gather import StepShape
from quire.runner.rows import RequestRows
from quire.runner.states import StepStates
from quire.step import StepPlan, Work


class Drafter(Protocol):
    def begin(self, plan: StepPlan) -> None:
        """A step begins: rows may have other requests, or other pages, from now on, and of works
        that are not read nothing is kept."""
        ...

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """The target's pages are copied so."""
        ...

    def fill(self, works: Sequence[Work]) -> None:
        """Write the drafts of these works into their rows, behind their newest tokens."""
        ...

    def keep(self, works: Sequence[Work], shape: StepShape, states: StepStates) -> None:
        """What the target computed in this step, of all that the runner was told to hand over."""
        ...

    def ahead(self) -> Iterator[Callable[[], object]]:
        """Captures of its own graphs, to be run one by one while no step is under way."""
        ...


def drafts_of(rows: RequestRows, sent: dict[str, Tensor]) -> Tensor:
    """What the rows have in the places of all samples of a step."""
    places = sent.get("sample_places", sent["sample_positions"])
    return rows.tokens[sent["sample_rows"].long(), places.long()]
