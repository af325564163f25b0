"""Exact log-probabilities of greedy tokens: what tests of bits compare."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.build import Engine
from quire.step import TokenLogprobs
from tests.model.test_parity import make

NUM_TOKENS = 8


def records(engine: Engine, some: Sequence[list[int]], first: int = 0) -> list[list[TokenLogprobs]]:
    """Of eight tokens after each prompt, all prompts at once; `first` keeps ids apart."""
    found: dict[int, list[TokenLogprobs]] = {first + i: [] for i in range(len(some))}
    for id, prompt in zip(found, some, strict=True):
        request = make(id, prompt, NUM_TOKENS)
        request.params = request.params.with_(logprobs=3)
        engine.core.add(request)
    while engine.core.has_work:
        for event in engine.core.step():
            found[event.request_id] += event.logprobs
    assert all(len(own) == NUM_TOKENS for own in found.values())
    return list(found.values())
