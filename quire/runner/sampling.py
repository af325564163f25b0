"""From rows to SampleInputs: only what some row of this step needs, the rest left out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.runner import rows as bits
from quire.runner.gather import StepShape
from quire.runner.rows import RequestRows, RowInfo
from quire.runner.upload import Uploader
from quire.sample.inputs import (
    BadWords,
    History,
    Penalties,
    SampleInputs,
    SampleRows,
    TokenEdits,
    TokenMask,
)


def sample_inputs(
    rows: RequestRows,
    shape: StepShape,
    sent: dict[str, Tensor],
    uploader: Uploader,
    mask: TokenMask | None = None,
) -> SampleInputs:
    row_ids = shape.rows[shape.sampled]
    needs = int(np.bitwise_or.reduce(rows.needs[row_ids], initial=0))
    infos = [rows.info[r] for r in row_ids] if needs & ~(bits.NOT_GREEDY | bits.MIN_P) else []
    history = penalties = None
    if needs & (bits.PENALTIES | bits.BAD_WORDS):
        at = sent["sample_rows"].long()  # [S]
        longest = int(shape.sample_lens.max())
        lens = sent["sample_positions"].long()
        prompt_lens = rows.int_columns[bits.PROMPT_LEN][at]
        if shape.trees is None:
            before = rows.tokens[at, :longest]
        else:
            fed = shape.sample_ends - 1
            before = shape.trees.history(rows.tokens, at, fed, shape.sample_lens, uploader)
        history = History(before.long(), prompt_lens, lens)
        if needs & bits.PENALTIES:
            floats = rows.floats[:, at]  # [6, S]
            penalties = Penalties(
                floats[bits.REPETITION], floats[bits.PRESENCE], floats[bits.FREQUENCY]
            )
    return SampleInputs(
        temperature=rows.float_columns[bits.TEMPERATURE],
        top_k=rows.int_columns[bits.CANDIDATES],
        top_p=rows.float_columns[bits.NUCLEUS],
        min_p=rows.float_columns[bits.FLOOR],
        seeds=rows.int_columns[bits.SEED],
        positions=sent["sample_positions"],
        all_greedy=not needs & bits.NOT_GREEDY,
        any_top_k=bool(needs & bits.TOP_K),
        any_top_p=bool(needs & bits.TOP_P),
        any_min_p=bool(needs & bits.MIN_P),
        num_logprobs=_most_logprobs(infos) if needs & bits.LOGPROBS else None,
        history=history,
        penalties=penalties,
        edits=_edits(infos, shape, uploader) if needs & bits.EDITS else None,
        bad_words=_bad_words(infos, uploader) if needs & bits.BAD_WORDS else None,
        mask=mask,
        rows=SampleRows(sent["sample_rows"], rows.tokens),
    )


def filtered_inputs(
    rows: RequestRows, row_ids: Tensor, positions: Tensor, narrows: bool
) -> SampleInputs:
    """Of samples that ask for a temperature and, if `narrows`, for filters: all derives from two
    device vectors and the rows, so a graph can capture it."""
    return SampleInputs(
        temperature=rows.float_columns[bits.TEMPERATURE],
        top_k=rows.int_columns[bits.CANDIDATES],
        top_p=rows.float_columns[bits.NUCLEUS],
        min_p=rows.float_columns[bits.FLOOR],
        seeds=rows.int_columns[bits.SEED],
        positions=positions,
        all_greedy=False,
        any_top_k=narrows,
        any_top_p=narrows,
        any_min_p=narrows,
        num_logprobs=None,
        rows=SampleRows(row_ids, rows.tokens),
    )


def _most_logprobs(infos: list[RowInfo | None]) -> int:
    return max(i.params.logprobs for i in infos if i and i.params.logprobs is not None)


class _Pairs(NamedTuple):
    rows: list[int]
    tokens: list[int]


def _edits(infos: list[RowInfo | None], shape: StepShape, uploader: Uploader) -> TokenEdits | None:
    bias, banned, allowed = _Pairs([], []), _Pairs([], []), _Pairs([], [])
    values: list[float] = []
    lens = shape.sample_lens
    for i, info in enumerate(infos):
        assert info is not None
        p = info.params
        for token, value in (p.logit_bias or {}).items():
            bias.rows.append(i)
            bias.tokens.append(token)
            values.append(value)
        for token in p.allowed_token_ids or ():
            allowed.rows.append(i)
            allowed.tokens.append(token)
        if lens[i] - info.num_prompt < p.min_tokens:
            banned.rows.extend([i] * len(info.banned_until_min))
            banned.tokens.extend(info.banned_until_min)
    if not (bias.rows or banned.rows or allowed.rows):
        return None
    sizes = (len(bias.rows), len(bias.rows), len(banned.rows), len(banned.rows), len(allowed.rows))
    flat = [*bias.rows, *bias.tokens, *banned.rows, *banned.tokens, *allowed.rows, *allowed.tokens]
    sent = uploader.send_one(torch.tensor(flat, dtype=torch.int64))
    a, b, c, d, e, f = sent.split((*sizes, len(allowed.rows)))
    weights = uploader.send_one(torch.tensor(values, dtype=torch.float32))
    return TokenEdits(a, b, weights, c, d, e, f)


def _bad_words(infos: list[RowInfo | None], uploader: Uploader) -> BadWords:
    pairs = [
        (i, words) for i, info in enumerate(infos) if info for words in info.params.bad_word_ids
    ]
    longest = max(len(words) - 1 for _, words in pairs)
    prefixes = [[-1] * (longest - len(w) + 1) + list(w[:-1]) for _, w in pairs]
    table = torch.tensor(
        [[i, w[-1], *prefix] for (i, w), prefix in zip(pairs, prefixes, strict=True)],
        dtype=torch.int64,
    )
    table = uploader.send_one(table)
    return BadWords(rows=table[:, 0], prefixes=table[:, 2:], last=table[:, 1])
