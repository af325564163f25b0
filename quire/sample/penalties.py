"""Edits to logits before the draw: allowed lists, bad words, bans, biases and penalties.

All of it is done in place on f32 logits [S, V], from index lists and without asking the device
anything, so it may run while the host prepares the next step. Token ids must lie inside the
vocabulary: requests are checked when they arrive. Only the cells named by the lists or the history
are touched; the one [S, V] buffer is the count of output tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from quire.sample.inputs import BadWords, History, Penalties, TokenEdits


def apply_allowed(logits: Tensor, edits: TokenEdits) -> None:
    """Ban all but the listed tokens in the rows that list any."""
    if not edits.allowed_rows.numel():
        return
    num_rows, vocab_size = logits.shape
    banned = torch.zeros(num_rows, dtype=torch.bool, device=logits.device)
    banned = banned.index_fill_(0, edits.allowed_rows, True)[:, None].repeat(1, vocab_size)
    cells = edits.allowed_rows * vocab_size + edits.allowed_tokens
    banned.view(-1).index_fill_(0, cells, False)
    logits.masked_fill_(banned, -torch.inf)


def apply_bans_and_biases(logits: Tensor, edits: TokenEdits) -> None:
    """Bans (min_tokens) and then biases, which cannot bring a banned token back."""
    vocab_size = logits.shape[1]
    flat = logits.view(-1)
    if edits.banned_rows.numel():
        flat.index_fill_(0, edits.banned_rows * vocab_size + edits.banned_tokens, -torch.inf)
    if edits.bias_rows.numel():
        flat.index_add_(0, edits.bias_rows * vocab_size + edits.bias_tokens, edits.bias_values)


def apply_bad_words(logits: Tensor, words: BadWords, history: History | None) -> None:
    """Ban the last token of each sequence whose other tokens end the row's history."""
    num_words, width = words.prefixes.shape
    if not num_words:
        return
    if width:
        assert history is not None, "bad words of several tokens need the history"
        #   history  [ ... a b c | junk ]      the prefix lies on the last `width` tokens;
        #   prefix         [-1 b c ]           -1 matches anything, even before the start
        columns = torch.arange(-width, 0, device=logits.device) + history.lens[words.rows, None]
        stride = history.tokens.shape[1]
        cells = words.rows[:, None] * stride + columns.clamp(min=0)  # [words, width]
        same = (history.tokens.reshape(-1)[cells] == words.prefixes) & (columns >= 0)
        matched = (same | (words.prefixes < 0)).all(dim=1)  # [words]
    else:
        matched = torch.ones(num_words, dtype=torch.bool, device=logits.device)
    # Adding is the write that is safe when two sequences share a cell and only one matches.
    ban = torch.zeros(num_words, device=logits.device).masked_fill_(matched, -torch.inf)
    logits.view(-1).index_add_(0, words.rows * logits.shape[1] + words.last, ban)


def apply_penalties(logits: Tensor, history: History, penalties: Penalties) -> None:
    """Repetition over prompt and output tokens, then frequency and presence over output tokens."""
    num_rows, vocab_size = logits.shape
    column = torch.arange(history.tokens.shape[1], device=logits.device)
    seen = column < history.lens[:, None]  # [S, L]
    is_output = seen & (column >= history.prompt_lens[:, None])
    # Junk columns stand in for column 0: a repeated cell is written twice with the same value.
    tokens = torch.where(seen, history.tokens, history.tokens[:, :1])
    tokens = tokens.clamp(0, vocab_size - 1)  # rows without any history hold junk in column 0 too
    counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=logits.device)
    counts.scatter_add_(1, tokens, is_output.int())
    count = counts.gather(1, tokens)  # [S, L]
    old = logits.gather(1, tokens)
    factor = penalties.repetition[:, None]
    new = torch.where(old > 0, old / factor, old * factor)
    new -= count * penalties.frequency[:, None] + (count > 0) * penalties.presence[:, None]
    logits.scatter_(1, tokens, torch.where(history.lens[:, None] > 0, new, old))
