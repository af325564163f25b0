"""CpuSampling: draws, masks and ranks of a CPU, row by row in numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.params import GREEDY_BELOW
from quire.sample.gumbel import TokenNoise, row_keys
from quire.sample.logprobs import best_of_rows
from quire.sample.mask import apply_mask
from quire.sample.truncate import Limits, kept_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from quire.sample.gumbel import Floats, Ints, Words
    from quire.sample.inputs import SampleInputs, TokenMask
    from quire.sample.ops import Best

_LARGEST = float(np.finfo(np.float32).max)


class CpuSampling:
    """`SampleOps`; keeps only scratch between calls."""

    def __init__(self) -> None:
        self._noise = TokenNoise(vocab_size=0)
        self._distance = np.empty(0, np.float32)

    def draw(self, logits: Tensor, inputs: SampleInputs) -> Tensor:
        tokens = self._draw(logits.float().numpy(), inputs)
        if inputs.rows is not None:
            table = inputs.rows.tokens.numpy()
            table[inputs.rows.ids.numpy(), inputs.positions.numpy()] = tokens
        return torch.from_numpy(tokens)

    def ranked(self, logits: Tensor, inputs: SampleInputs, num: int) -> Tensor:
        """As in `SampleOps`; tokens repeat where few are left."""
        return torch.from_numpy(self._order(logits.float().numpy(), inputs, num))

    def ban(self, logits: Tensor, mask: TokenMask) -> None:
        apply_mask(logits, mask)

    def best(self, logprobs: Tensor, chosen: Tensor, num: int) -> Best:
        return best_of_rows(logprobs, chosen, num)

    def _draw(self, rows: Floats, inputs: SampleInputs) -> Ints:
        if inputs.all_greedy:
            return _likeliest(rows)
        return self._order(rows, inputs, 1)[:, 0]

    def _order(self, rows: Floats, inputs: SampleInputs, num: int) -> Ints:
        inputs = inputs.by_sample()
        vocab_size = rows.shape[1]
        if self._noise.vocab_size != vocab_size:
            self._noise = TokenNoise(vocab_size)
            self._distance = np.empty(vocab_size, np.float32)
        keys = row_keys(inputs.seeds.numpy(), inputs.positions.numpy())  # [S, 2]
        filters = zip(
            inputs.top_k.tolist(), inputs.top_p.tolist(), inputs.min_p.tolist(), strict=True
        )
        tokens = np.zeros((len(rows), num), np.int64)
        for i, (temperature, limits) in enumerate(
            zip(inputs.temperature.tolist(), filters, strict=True)
        ):
            row = _clean(rows[i])
            if temperature < GREEDY_BELOW:
                tokens[i] = np.argmax(row) if num == 1 else _smallest(-row, num)
            elif (best := row.max()) > -np.inf:
                distance = _distances(row, best, temperature, self._distance)
                limit = Limits.of(*limits, vocab_size)
                tokens[i] = self._first_arrivals(distance, limit, keys[i], num)
        return tokens

    def _first_arrivals(self, distance: Floats, limits: Limits, key: Words, num: int) -> Ints:
        if limits.is_off:
            return _smallest(np.add(distance, self._noise.log_times(key), out=distance), num)
        tokens = kept_tokens(distance, limits)
        times = distance[tokens] + self._noise.log_times_at(key, tokens)
        return tokens[_smallest(times, num)]


def _likeliest(rows: Floats) -> Ints:
    """[S, V] -> [S], in one pass: NaN and +inf, if there are any, come out on top."""
    best: Ints = rows.argmax(axis=1)
    is_clean = rows[np.arange(len(rows)), best] < np.inf
    if not is_clean.all():
        for i in np.flatnonzero(~is_clean):
            best[i] = _clean(rows[i]).argmax()
    return best


def _smallest(values: Floats, num: int) -> Ints:
    """[num] places of the smallest values in order; the last repeats where there are fewer."""
    if num == 1:
        return np.asarray([np.argmin(values)])
    few = min(num, len(values))
    places = np.sort(np.argpartition(values, few - 1)[:few])
    order = places[np.argsort(values[places], kind="stable")]
    return np.pad(order, (0, num - few), mode="edge")


def _clean(row: Floats) -> Floats:
    """[V] without NaN or +inf; the argument itself when it has none."""
    if row.max() < np.inf:  # false for NaN, which max() passes on
        return row
    return np.nan_to_num(row, nan=-np.inf, posinf=_LARGEST, neginf=-np.inf)


def _distances(row: Floats, best: np.float32, temperature: float, out: Floats) -> Floats:
    with np.errstate(over="ignore"):  # infinitely far is the right answer
        np.subtract(best, row, out=out)
        return np.divide(out, np.float32(temperature), out=out)
