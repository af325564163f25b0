"""Edits before the draw: which cells change, by how much, and that junk never counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.sample.inputs import BadWords, Penalties, TokenEdits
from quire.sample.penalties import (
    apply_allowed,
    apply_bad_words,
    apply_bans_and_biases,
    apply_penalties,
)
from quire.sample.sampler import Sampler
from tests.sample.cases import Row, make_history, make_inputs

NONE = torch.zeros(0, dtype=torch.int64)
INF = float("inf")


def _edits(**lists: list[float]) -> TokenEdits:
    names = (
        "bias_rows", "bias_tokens", "bias_values", "banned_rows", "banned_tokens",
        "allowed_rows", "allowed_tokens",
    )  # fmt: skip
    made = {name: torch.tensor(lists.get(name, []), dtype=torch.int64) for name in names}
    made["bias_values"] = torch.tensor(lists.get("bias_values", []), dtype=torch.float32)
    return TokenEdits(**made)


def _words(*sequences: tuple[int, list[int]], width: int) -> BadWords:
    """(row, token sequence) pairs."""
    prefixes = [[-1] * (width - len(ids) + 1) + ids[:-1] for _, ids in sequences]
    return BadWords(
        rows=torch.tensor([row for row, _ in sequences]),
        prefixes=torch.tensor(prefixes, dtype=torch.int64).reshape(len(sequences), width),
        last=torch.tensor([ids[-1] for _, ids in sequences]),
    )


def _banned(logits: Tensor) -> list[tuple[int, int]]:
    return [(int(r), int(t)) for r, t in (logits == -INF).nonzero()]


def _penalise(
    logits: Tensor, row: tuple[list[int], list[int]], junk: int = 2, **values: float
) -> Tensor:
    penalties = Penalties(
        torch.tensor([values.get("repetition", 1.0)]),
        torch.tensor([values.get("presence", 0.0)]),
        torch.tensor([values.get("frequency", 0.0)]),
    )
    apply_penalties(logits, make_history([row], width=9, junk=junk), penalties)
    return logits


def test_repetition_covers_prompt_and_output_and_both_signs() -> None:
    logits = _penalise(torch.tensor([[2.0, -2.0, 3.0, 1.0]]), ([0, 1], [3]), repetition=2.0)
    assert logits.tolist() == [[1.0, -4.0, 3.0, 0.5]]


def test_presence_and_frequency_cover_output_only() -> None:
    logits = _penalise(torch.zeros(1, 5), ([0, 1, 1], [1, 3, 3]), presence=0.5, frequency=0.25)
    assert logits.tolist() == [[0.0, -0.75, 0.0, -1.0, 0.0]]


def test_penalties_come_in_the_order_repetition_first() -> None:
    logits = _penalise(torch.full((1, 3), 4.0), ([], [1]), repetition=2.0, presence=1.0)
    assert logits.tolist() == [[4.0, 1.0, 4.0]]


@pytest.mark.parametrize("junk", [-1, 2, 4, 10**9])
def test_junk_columns_do_not_count(junk: int) -> None:
    logits = torch.zeros(1, 5)
    _penalise(logits, ([0], [4, 4]), presence=1.0, frequency=1.0, repetition=3.0, junk=junk)
    assert logits.tolist() == [[0.0, 0.0, 0.0, 0.0, -3.0]]
    empty = torch.ones(1, 5)
    _penalise(empty, ([], []), presence=1.0, frequency=1.0, repetition=3.0, junk=junk)
    assert empty.tolist() == [[1.0] * 5]


def test_banned_tokens_stay_banned_under_penalties() -> None:
    logits = torch.tensor([[-INF, 1.0]])
    _penalise(logits, ([0], [0]), repetition=0.5, presence=-2.0, frequency=-2.0)
    assert logits.tolist() == [[-INF, 1.0]]


def test_allowed_rows_keep_their_tokens_and_others_everything() -> None:
    logits = torch.zeros(3, 4)
    apply_allowed(logits, _edits(allowed_rows=[1, 1, 2], allowed_tokens=[0, 3, 3]))
    assert _banned(logits) == [(1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]


def test_bias_does_not_revive_a_banned_token() -> None:
    logits = torch.zeros(2, 3)
    edits = _edits(
        banned_rows=[0], banned_tokens=[2],
        bias_rows=[0, 0, 1], bias_tokens=[2, 1, 2], bias_values=[100.0, -1.5, 2.0],
    )  # fmt: skip
    apply_bans_and_biases(logits, edits)
    assert logits.tolist() == [[0.0, -1.5, -INF], [0.0, 0.0, 2.0]]


def test_bad_words_match_the_end_of_history_only() -> None:
    history = make_history([([1, 2], [3]), ([2, 3], []), ([3], [])], width=5, junk=3)
    words = _words(
        (0, [2, 3, 4]), (0, [1, 2, 5]), (1, [2, 3, 4]), (1, [7, 2, 3, 6]), (2, [3, 3, 1]),
        (2, [0]), (2, [3, 7]),
        width=3,
    )  # fmt: skip
    logits = torch.zeros(3, 8)
    apply_bad_words(logits, words, history)
    assert _banned(logits) == [(0, 4), (1, 4), (2, 0), (2, 7)]


def test_bad_words_sharing_a_last_token_do_not_unban_each_other() -> None:
    history = make_history([([1, 2], [])], width=2, junk=0)
    for sequences in ([(0, [2, 5]), (0, [1, 5])], [(0, [1, 5]), (0, [2, 5])]):
        logits = torch.zeros(1, 6)
        apply_bad_words(logits, _words(*sequences, width=1), history)
        assert _banned(logits) == [(0, 5)]


def test_single_token_bad_words_need_no_history() -> None:
    logits = torch.zeros(2, 3)
    apply_bad_words(logits, _words((1, [2]), width=0), None)
    assert _banned(logits) == [(1, 2)]


def test_order_of_edits_and_raw_logprobs() -> None:
    """Greedy follows the edited logits; log-probabilities are of the raw ones."""
    raw = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    inputs = replace(
        make_inputs([Row(0.0)], num_logprobs=2),
        edits=_edits(
            allowed_rows=[0, 0, 0], allowed_tokens=[0, 1, 2], banned_rows=[0], banned_tokens=[0],
            bias_rows=[0, 0], bias_tokens=[3, 2], bias_values=[50.0, 0.5],
        ),
        history=make_history([([1], [])], width=3, junk=2),
        penalties=Penalties(torch.tensor([2.0]), torch.zeros(1), torch.zeros(1)),
        bad_words=_words((0, [9, 1]), width=1),
    )  # fmt: skip
    out = Sampler()(raw.clone().bfloat16(), inputs)
    assert out.tokens.tolist() == [2]  # 0 banned, 1 halved by repetition, 3 not allowed
    assert out.logprobs is not None
    torch.testing.assert_close(out.logprobs.chosen, raw.log_softmax(-1)[:, 2])
    assert out.logprobs.chosen_rank.tolist() == [3]
    assert out.logprobs.top_tokens.tolist() == [[0, 1]]
