"""HeadTape: a guess of a head as one native call, where every operation of it can be recorded.

A guess is a few products of few rows, so on a CPU most of its time would be Python's. As for whole
steps (`tapes.py`) there are two recordings: all rows to the end, or only those that are drawn from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from quire.attn.backend import AttentionBackend
from quire.attn.native import NativeAttention
from quire.forward import Batch, LayerContext
from quire.models.heads.feature_head import Guessed, Stored
from quire.native.heads import StepPointers, address_of
from quire.native.tape import NotRecordable, Rows, Tape
from quire.runner.tapes import RecordedBatch

if TYPE_CHECKING:
    from quire.runner.feature_drafter import HeadLayer

MOST_ROWS = 64  # of a recorded guess: with more, Python's time does not show


class HeadTape:
    def __init__(self, layer: HeadLayer, hidden_size: int) -> None:
        """`hidden_size`: of its features. Raises NotRecordable."""
        if not isinstance(layer.backend, NativeAttention):
            raise NotRecordable(f"{type(layer.backend).__name__} is not native")
        self._whole = _Recording(layer, layer.backend, hidden_size, has_tail=False)
        self._tail = _Recording(layer, layer.backend, hidden_size, has_tail=True)

    def run(
        self, batch: Batch, sent: dict[str, Tensor], features: Tensor, has_tail: bool
    ) -> Guessed:
        """What the head's `store` and `attend` give. It stays until the next guess."""
        return (self._tail if has_tail else self._whole).run(batch, sent, features)


class _Recording:
    def __init__(
        self, layer: HeadLayer, attention: NativeAttention, hidden_size: int, has_tail: bool
    ) -> None:
        self.tape = Tape(attention.library, MOST_ROWS)
        self.has_tail, self.pointers = has_tail, StepPointers(1)
        # The memory of features and results is nobody else's: they are read between replays.
        self.incoming = self.tape.rows(hidden_size, False)
        batch = cast("Batch", RecordedBatch(self.tape))
        plan = attention.recorded_plan(0, batch)
        at = LayerContext(cast("AttentionBackend", attention), layer.pool.layer(0), plan)
        stored = layer.head.store(batch.input_ids, cast("Tensor", self.incoming), at)
        if has_tail:
            chosen = cast("Tensor", self.tape)
            stored = Stored(*(part.index_select(0, chosen) for part in stored))
        made = [cast("object", part) for part in layer.head.attend(stored, at)]
        self.results = [rows for rows in made if isinstance(rows, Rows)]
        assert len(self.results) == len(made), "a guess is rows"
        self.tape.end()

    def run(self, batch: Batch, sent: dict[str, Tensor], features: Tensor) -> Guessed:
        num_tokens, num_samples = batch.num_tokens, sent["sample_index"].shape[0]
        _view(self.incoming, num_tokens).copy_(features)
        step = self.pointers.step((batch,))
        step.sample_index = address_of(sent["sample_index"], torch.int64)
        step.sample_rows = address_of(sent["sample_rows"], torch.int32)
        step.num_samples = num_samples
        self.tape.replay(step, batch.input_ids)
        num_rows = num_samples if self.has_tail else num_tokens
        return Guessed(*(_view(rows, num_rows) for rows in self.results))


def _view(rows: Rows, count: int) -> Tensor:
    """[count, width]"""
    return rows.memory.view(MOST_ROWS, -1)[:count, : rows.width]
