"""Perplexity and divergence beside transformers, and bits that no batch can change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quire.errors import BadRequest
from quire.evaluate import score
from quire.evaluate.compare import Reference, TokenScores, divergence, score_windows
from quire.evaluate.texts import HeldOut, Windows, cut
from quire.llm import LLM
from tests.evaluate.conftest import Tiny

OpenTiny = Callable[..., LLM]
WINDOW, TOKENS = 64, 256


@pytest.fixture(scope="module")
def windows(tiny: Tiny, open_tiny: OpenTiny, held_out: HeldOut) -> Windows:
    return cut(held_out, open_tiny(tiny).get_tokenizer(), WINDOW, TOKENS)


def oracle(model: Any, windows: Windows) -> torch.Tensor:
    """[windows, scored tokens, vocabulary] log-probabilities in fp64."""
    with torch.no_grad():
        logits = model(torch.tensor(windows.ids)).logits[:, :-1]
    return torch.log_softmax(logits.double(), -1)


def scored(
    open_tiny: OpenTiny, tiny: Tiny, shaken: Tiny, windows: Windows, **changes: Any
) -> TokenScores:
    """The shaken model against the other one."""
    llm = open_tiny(tiny, **changes)
    reference = Reference(llm, windows)
    score_windows(llm, windows, keep=reference)
    reference.release_layers()
    del llm
    return score_windows(open_tiny(shaken, **changes), windows, reference)


def test_beside_transformers(
    open_tiny: OpenTiny, tiny: Tiny, shaken: Tiny, windows: Windows
) -> None:
    """Red when a position is scored against the wrong token, or a distribution is not whole."""
    found = scored(open_tiny, tiny, shaken, windows)
    theirs, ours = oracle(tiny.oracle, windows), oracle(shaken.oracle, windows)
    targets = torch.tensor(windows.ids)[:, 1:, None]
    np.testing.assert_allclose(found.logprobs, ours.gather(2, targets).squeeze(2), atol=2e-5)
    exact = (theirs.exp() * (theirs - ours)).sum(-1)
    assert exact.mean() > 0.01  # the two do differ
    assert found.divergence is not None and found.agrees is not None
    np.testing.assert_allclose(found.divergence, exact, atol=2e-5)
    same = (theirs.argmax(-1) == ours.argmax(-1)).numpy()
    assert 0.1 < same.mean() < 1.0
    assert (found.agrees == same).mean() > 0.99  # a tie within rounding may fall either way


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 2},
        {"max_num_seqs": 1},
        {"kv_cache_memory": 36_000},
    ],
    ids=["chunks", "alone", "few pages"],
)
def test_bits_do_not_depend_on_the_batch(
    changes: dict[str, Any], open_tiny: OpenTiny, tiny: Tiny, shaken: Tiny, windows: Windows
) -> None:
    """Red when chunks, neighbours or waiting for pages show in a score."""
    usual = scored(open_tiny, tiny, shaken, windows)
    other = scored(open_tiny, tiny, shaken, windows, **changes)
    assert (usual.logprobs == other.logprobs).all()
    assert (usual.divergence == other.divergence).all()


def test_few_logits_at_once(
    open_tiny: OpenTiny, tiny: Tiny, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the piece that a position falls into changes its score."""
    llm = open_tiny(tiny)
    whole = score_windows(llm, windows).logprobs
    monkeypatch.setattr(score, "LOGITS_AT_ONCE", 3 * llm._engine.spec.vocab_size)
    assert (score_windows(llm, windows).logprobs == whole).all()


def test_a_model_against_itself(open_tiny: OpenTiny, tiny: Tiny, windows: Windows) -> None:
    """Red when kept states and the head do not give the same logits again."""
    found = scored(open_tiny, tiny, tiny, windows)
    assert found.divergence is not None and found.agrees is not None
    assert found.divergence.max() == 0.0 and found.agrees.min() == 1.0


def test_impossible_tokens_add_nothing() -> None:
    theirs = torch.tensor([[1.0, 0.0]]).log()
    assert divergence(theirs, torch.tensor([[0.5, 0.5]]).log()).item() == pytest.approx(np.log(2))
    assert divergence(theirs, theirs).item() == 0.0


def test_vocabularies_that_differ(open_tiny: OpenTiny, tiny: Tiny, windows: Windows) -> None:
    llm = open_tiny(tiny)
    reference = Reference(llm, windows)
    with pytest.raises(BadRequest, match="vocabularies differ"):
        reference.check(windows, reference.vocab_size + 1)
    other = Windows(tuple(w[::-1] for w in windows.ids), windows.num_bytes)
    with pytest.raises(BadRequest, match="bits per byte"):
        reference.check(other, reference.vocab_size)


def test_windows_begin_as_the_tokenizer_begins(
    open_tiny: OpenTiny, tiny: Tiny, held_out: HeldOut
) -> None:
    """Red when a window lacks the first token, or a token of the text is left out or repeated."""
    tokenizer = open_tiny(tiny).get_tokenizer()
    windows = cut(held_out, tokenizer, WINDOW, TOKENS)
    assert windows.length == WINDOW and len(windows.ids) == TOKENS // WINDOW
    assert {w[0] for w in windows.ids} == {tokenizer.bos_id}
    joined = [id for w in windows.ids for id in w[1:]]
    ids = tokenizer.encode(held_out.text, add_special_tokens=False)
    assert joined == ids[: len(joined)]
    assert windows.num_bytes == len(tokenizer.decode(joined).encode())


def test_short_text(open_tiny: OpenTiny, tiny: Tiny) -> None:
    tokenizer = open_tiny(tiny).get_tokenizer()
    with pytest.raises(BadRequest, match=r"less than a window of 64.*--window"):
        cut(HeldOut("short", "the lazy dog", ""), tokenizer, WINDOW, TOKENS)
