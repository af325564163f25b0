"""Log-probabilities: values, ranks, the order of ties, and prompts in pieces."""

from __future__ import annotations

import pytest
import torch

from quire.sample.logprobs import gather_logprobs, log_softmax, prompt_logprobs, top_by_keys
from quire.sample.sampler import Sampler
from tests.sample.cases import Row, make_inputs


@pytest.mark.parametrize("num", [0, 1, 5, 64, 300])
@pytest.mark.parametrize("vocab_size", [37, 300, 20_000])
def test_top_and_rank(num: int, vocab_size: int) -> None:
    logits = (torch.randn(4, vocab_size) * 3).bfloat16()  # bf16: many ties
    logprobs = log_softmax(logits)
    tokens = torch.randint(0, vocab_size, (4,))
    out = gather_logprobs(logprobs, tokens, num)
    want, order = logprobs.sort(dim=-1, descending=True, stable=True)
    num = min(num, vocab_size)
    assert torch.equal(out.top_tokens, order[:, :num])
    assert torch.equal(out.top_values, want[:, :num])
    assert torch.equal(out.chosen, logprobs[torch.arange(4), tokens])
    assert torch.equal(out.chosen_rank, (logprobs > out.chosen[:, None]).sum(1) + 1)


def test_both_selections_agree_on_ties_and_infinities() -> None:
    logits = (torch.randn(3, 5000) * 4).round()
    logits[0, :4990] = -torch.inf
    logprobs = log_softmax(logits)
    tokens = torch.zeros(3, dtype=torch.int64)
    out = gather_logprobs(logprobs, tokens, 32)
    assert torch.equal(out.top_tokens, top_by_keys(logprobs, 32))


def test_nan_rows_leave_others_alone() -> None:
    logits = torch.randn(2, 40)
    want = log_softmax(logits[1:])
    logits[0, 3] = torch.nan
    out = Sampler()(logits, make_inputs([Row(0.0), Row(0.0)], num_logprobs=4)).logprobs
    assert out is not None
    assert torch.equal(out.top_values[1], want[0].topk(4).values)
    assert out.top_tokens.shape == (2, 4)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_prompt_in_pieces(chunk: int) -> None:
    hidden, weight = torch.randn(7, 8), torch.randn(50, 8)
    targets = torch.randint(0, 50, (7,))
    sizes: list[int] = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows @ weight.T

    out = prompt_logprobs(hidden, targets, head, num=3, chunk=chunk)
    assert max(sizes) <= chunk
    assert sum(sizes) == 7
    want = (hidden @ weight.T).log_softmax(-1)
    torch.testing.assert_close(out.chosen, want[torch.arange(7), targets])
    torch.testing.assert_close(out.top_values, want.topk(3).values)
    assert out.chosen_rank.shape == (7,)
