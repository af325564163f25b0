"""Sampler: logits of a step to one token for each row, in the order vLLM applies things.

Log-probabilities of the raw logits come first; then allowed tokens, bad words, bans, biases,
penalties and grammar masks; then argmax for greedy rows, and temperature, min_p, top_k, top_p and
the seeded draw for the others. The GPU draws in fused kernels without ever waiting
(`kernels/sample.py`); the CPU draws row by row in numpy, which is faster there than batched torch
and makes rows independent by nature.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.params import GREEDY_BELOW
from quire.sample.gumbel import TokenNoise, row_keys
from quire.sample.inputs import SampleOutput
from quire.sample.logprobs import gather_logprobs, log_softmax
from quire.sample.mask import apply_mask
from quire.sample.penalties import (
    apply_allowed,
    apply_bad_words,
    apply_bans_and_biases,
    apply_penalties,
)
from quire.sample.truncate import Limits, kept_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from quire.sample.gumbel import Floats, Ints, Words
    from quire.sample.inputs import SampleInputs

_LARGEST = float(np.finfo(np.float32).max)


class Sampler:
    """Draws tokens; keeps only scratch between calls, so a call depends on its arguments alone.

    NaN logits count as banned (-inf), +inf as the largest float; a row with nothing left yields
    token 0. On a GPU no call waits for the device.
    """

    def __init__(self) -> None:
        self._noise = TokenNoise(vocab_size=0)
        self._distance = np.empty(0, np.float32)

    @torch.inference_mode()
    def __call__(self, logits: Tensor, inputs: SampleInputs) -> SampleOutput:
        """[S, V] any float -> [S] tokens, stored in the rows too. May write into `logits`."""
        num = inputs.num_logprobs
        logprobs = None if num is None else log_softmax(logits)
        logits = _edit(logits, inputs)
        if inputs.mask is not None:
            apply_mask(logits, inputs.mask)
        tokens = self._draw(logits, inputs)
        if logprobs is None or num is None:
            return SampleOutput(tokens, None)
        return SampleOutput(tokens, gather_logprobs(logprobs, tokens, num))

    def _draw(self, logits: Tensor, inputs: SampleInputs) -> Tensor:
        if logits.is_cuda:
            # Here and not above: CPU installs need no triton.
            from quire.kernels.sample import DrawArgs, draw

            rows = inputs.rows
            args = DrawArgs(
                temperature=inputs.temperature,
                seeds=inputs.seeds,
                positions=inputs.positions,
                top_k=inputs.top_k,
                top_p=inputs.top_p,
                min_p=inputs.min_p,
                narrows=inputs.any_top_k or inputs.any_top_p or inputs.any_min_p,
                rows=None if rows is None else rows.ids,
                table=None if rows is None else rows.tokens,
            )
            return draw(logits, args)
        tokens = self._draw_cpu(logits.float().numpy(), inputs)
        if inputs.rows is not None:
            table = inputs.rows.tokens.numpy()
            table[inputs.rows.ids.numpy(), inputs.positions.numpy()] = tokens
        return torch.from_numpy(tokens)

    def _draw_cpu(self, rows: Floats, inputs: SampleInputs) -> Ints:
        if inputs.all_greedy:
            return _likeliest(rows)
        inputs = _gathered(inputs)
        vocab_size = rows.shape[1]
        if self._noise.vocab_size != vocab_size:
            self._noise = TokenNoise(vocab_size)
            self._distance = np.empty(vocab_size, np.float32)
        keys = row_keys(inputs.seeds.numpy(), inputs.positions.numpy())  # [S, 2]
        filters = zip(
            inputs.top_k.tolist(), inputs.top_p.tolist(), inputs.min_p.tolist(), strict=True
        )
        tokens = np.zeros(len(rows), np.int64)
        for i, (temperature, limits) in enumerate(
            zip(inputs.temperature.tolist(), filters, strict=True)
        ):
            row = _clean(rows[i])
            if temperature < GREEDY_BELOW:
                tokens[i] = np.argmax(row)
            elif (best := row.max()) > -np.inf:
                distance = _distances(row, best, temperature, self._distance)
                tokens[i] = self._first_arrival(distance, Limits.of(*limits, vocab_size), keys[i])
        return tokens

    def _first_arrival(self, distance: Floats, limits: Limits, key: Words) -> int:
        if limits.is_off:
            return int(np.argmin(np.add(distance, self._noise.log_times(key), out=distance)))
        tokens = kept_tokens(distance, limits)
        return int(tokens[np.argmin(distance[tokens] + self._noise.log_times_at(key, tokens))])


def _gathered(inputs: SampleInputs) -> SampleInputs:
    """The same settings, with one entry for each sample."""
    if inputs.rows is None:
        return inputs
    ids = inputs.rows.ids
    return replace(
        inputs,
        temperature=inputs.temperature[ids],
        top_k=inputs.top_k[ids],
        top_p=inputs.top_p[ids],
        min_p=inputs.min_p[ids],
        seeds=inputs.seeds[ids],
        rows=None,
    )


def _edit(logits: Tensor, inputs: SampleInputs) -> Tensor:
    """Logits after everything that can change the argmax; the argument itself when nothing does."""
    history, penalties = inputs.history, inputs.penalties
    if inputs.edits is None and inputs.bad_words is None and penalties is None:
        return logits
    logits = logits.float().contiguous()
    if inputs.edits is not None:
        apply_allowed(logits, inputs.edits)
    if inputs.bad_words is not None:
        apply_bad_words(logits, inputs.bad_words, history)
    if inputs.edits is not None:
        apply_bans_and_biases(logits, inputs.edits)
    if penalties is not None:
        assert history is not None, "penalties need the history"
        apply_penalties(logits, history, penalties)
    return logits


def _likeliest(rows: Floats) -> Ints:
    """[S, V] -> [S], in one pass: NaN and +inf, if there are any, come out on top."""
    best: Ints = rows.argmax(axis=1)
    is_clean = rows[np.arange(len(rows)), best] < np.inf
    if not is_clean.all():
        for i in np.flatnonzero(~is_clean):
            best[i] = _clean(rows[i]).argmax()
    return best


def _clean(row: Floats) -> Floats:
    """[V] without NaN or +inf; the argument itself when it has none."""
    if row.max() < np.inf:  # false for NaN, which max() passes on
        return row
    return np.nan_to_num(row, nan=-np.inf, posinf=_LARGEST, neginf=-np.inf)


def _distances(row: Floats, best: np.float32, temperature: float, out: Floats) -> Floats:
    with np.errstate(over="ignore"):  # infinitely far is the right answer
        np.subtract(best, row, out=out)
        return np.divide(out, np.float32(temperature), out=out)
