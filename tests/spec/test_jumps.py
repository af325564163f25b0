"""Jumps: what grammars force is drafted where no method is, and nobody is waited for in vain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.params import StructuredOutputsParams
from quire.request import RequestId
from quire.spec.jumps import Jumps
from tests.spec.cases import TEXTS, answer, open_tiny, sampling, undrafted
from tests.unit.case import Case

CHOICES = StructuredOutputsParams(regex="(red|blue) is a colour, (one|two) is a number")
GRAMMAR = StructuredOutputsParams(regex="whatever: the double below says what it forces")


class Known:
    """Grammars that force these tokens wherever they are asked."""

    def __init__(self, forced: Sequence[int]) -> None:
        self.tokens, self.num_asked = forced, 0

    def has_any(self) -> bool:
        return True

    def forced(self, request_id: RequestId) -> Sequence[int]:
        self.num_asked += 1
        return self.tokens

    def forced_so_far(self, request_id: RequestId) -> Sequence[int]:
        return self.tokens


def case_with(forced: Sequence[int], overlap: bool = False) -> tuple[Case, Jumps]:
    case = Case(overlap=overlap)
    case.core.drafts = drafts = Jumps(Known(forced))
    return case, drafts


@pytest.mark.parametrize("lag", [0, 1])
def test_jumps_change_nothing(lag: int, tmp_path: Path) -> None:
    """Red when a draft of a grammar's is judged by another mask, or leaves its matcher ahead."""
    kinds = {"json": {}, "grammar": {"structured_outputs": CHOICES}, "warm": {"max_tokens": 9}}
    asked = [
        (t, sampling(kind, 3, **{"max_tokens": 60, **own}))
        for kind, own in kinds.items()
        for t in TEXTS
    ]
    plain, llm = undrafted(open_tiny(tmp_path, "llama")), open_tiny(tmp_path, "llama")
    plain._engine.core.lag = llm._engine.core.lag = lag
    want = answer(plain, asked)
    assert answer(llm, asked) == want
    assert llm.stats().num_accepted_tokens > 40


@pytest.mark.parametrize(("forced", "awaits"), [((), False), ((5,), False), ((5, 6), True)])
def test_results_are_awaited_for_what_is_forced_behind_them(
    forced: tuple[int, ...], awaits: bool
) -> None:
    """Red when a token in flight is waited for that nothing is known to follow."""
    case, drafts = case_with(forced, overlap=True)
    case.scheduler.add(case.request([1, 2, 3], structured_outputs=GRAMMAR))
    case.step()
    assert drafts.awaits_results(case.scheduler) is awaits


@pytest.mark.parametrize("wish", [{}, {"structured_outputs": GRAMMAR, "num_speculative_tokens": 0}])
def test_who_has_no_grammar_or_declines_gets_none(wish: dict[str, object]) -> None:
    case, drafts = case_with((5, 6), overlap=True)
    case.scheduler.add(case.request([1, 2, 3], 8, **wish))
    case.step()
    assert not drafts.awaits_results(case.scheduler)
    case.run()
    assert not drafts.counts.num_runs


def test_drafts_that_are_always_wrong_become_rare() -> None:
    """Red when a grammar whose text has another spelling costs rows in every step."""
    case, drafts = case_with((99,))
    case.scheduler.add(case.request([1, 2, 3], 60, structured_outputs=GRAMMAR))
    case.run()
    assert 8 <= drafts.counts.num_runs < 30
    assert not any(drafts.counts.accepted_at)
