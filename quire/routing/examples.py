"""Examples: prompts with both models' answers, each scored, from lines of JSON.

A line has `prompt` or `messages` (or any body of a request), `small` and `large`: the two answers.
Scores are columns (`small_score`, `large_score`), or come from a scorer: the large model's own
log-likelihood (`evaluate/likelihood.py`) or a command (`judge.py`). The small model suffices
where its score reaches the large one's, less a tolerance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.errors import BadRequest
from quire.routing.ask import Ask, read_ask
from quire.routing.features import vector_of

MIN_ROWS = 50
Scorer = Callable[[Sequence[tuple[dict[str, Any], str]]], list[float]]


class Examples(NamedTuple):
    asks: list[Ask]
    rows: NDArray[np.float64]  # [examples, features]
    small: NDArray[np.float64]  # [examples]: scores
    large: NDArray[np.float64]
    logprobs: NDArray[np.float64] | None  # [examples]: mean of the small model's own answer
    tolerance: float

    @property
    def suffices(self) -> NDArray[np.bool_]:
        return self.small >= self.large - self.tolerance

    def at(self, places: NDArray[np.intp]) -> Examples:
        return Examples(
            [self.asks[i] for i in places],
            self.rows[places],
            self.small[places],
            self.large[places],
            None if self.logprobs is None else self.logprobs[places],
            self.tolerance,
        )


def read_examples(path: Path, score: Scorer | None, tolerance: float) -> Examples:
    """Raises BadRequest with the line that is wrong."""
    records = [_record(text, path, at) for at, text in enumerate(_lines(path), 1)]
    if len(records) < MIN_ROWS:
        raise BadRequest(f"{path}: got {len(records)} examples, want at least {MIN_ROWS}")
    asks = [read_ask(record) for record in records]
    if score is None:
        small, large = (_column(records, f"{who}_score", path) for who in ("small", "large"))
    else:
        asked = [
            (record, _answer(record, who, path, at))
            for who in ("small", "large")
            for at, record in enumerate(records, 1)
        ]
        found = np.array(score(asked), np.float64)
        small, large = found[: len(records)], found[len(records) :]
    has_logprobs = all("small_mean_logprob" in record for record in records)
    logprobs = _column(records, "small_mean_logprob", path) if has_logprobs else None
    rows = np.stack([vector_of(ask) for ask in asks])
    made = Examples(asks, rows, small, large, logprobs, tolerance)
    if made.suffices.all() or not made.suffices.any():
        which = "all" if made.suffices.all() else "none"
        raise BadRequest(
            f"{path}: the small model suffices for {which} of the examples; there is nothing to"
            " learn (see --tolerance)"
        )
    return made


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path}: {error}") from None


def _record(text: str, path: Path, at: int) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except ValueError as error:
        raise BadRequest(f"{path}, example {at}: {error}") from None
    if not isinstance(record, dict) or not read_ask(record).text:
        raise BadRequest(f"{path}, example {at}: want an object with `prompt` or `messages`")
    return record


def _answer(record: Mapping[str, Any], who: str, path: Path, at: int) -> str:
    answer = record.get(who)
    if not isinstance(answer, str):
        raise BadRequest(f"{path}, example {at}: want `{who}`, the {who} model's answer")
    return answer


def _column(records: Sequence[Mapping[str, Any]], name: str, path: Path) -> NDArray[np.float64]:
    for at, record in enumerate(records, 1):
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BadRequest(
                f"{path}, example {at}: want `{name}`, a number; or score the answers with"
                " --likelihood MODEL or --judge CMD"
            )
    return np.array([record[name] for record in records], np.float64)
