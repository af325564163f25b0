"""Tapes: steps on a CPU as one native call each, where every layer of the model can be recorded.

Two recordings of the same model: all rows to the end, or only those that are read (`tail.py`). A
row's bits are the same in both. A model that cannot be recorded runs layer by layer.
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch
from torch import Tensor

from quire.forward import Batch, ForwardContext, Tail
from quire.memory.pool import PagePool
from quire.models.decoder import Decoder
from quire.native.attention import TapeAttention
from quire.native.library import Library
from quire.native.tape import NotRecordable, Rows, Step, Tape


class Tapes:
    def __init__(self, model: Decoder, pool: PagePool, library: Library, max_tokens: int) -> None:
        """Raises NotRecordable."""
        if model.spec.mla is not None:
            raise NotRecordable("latent attention is not native yet")
        num_groups = len(pool.groups)
        self.whole = _Recording(model, pool, library, max_tokens, num_groups, False)
        self.tail = _Recording(model, pool, library, max_tokens, num_groups, True)

    def run(self, batches: tuple[Batch, ...], sent: dict[str, Tensor], has_tail: bool) -> Tensor:
        """Hidden states after the last norm: of all tokens, or of those drawn from alone.

        They stay until the next step."""
        recording = self.tail if has_tail else self.whole
        return recording.run(batches, sent)


class _Recording:
    def __init__(
        self,
        model: Decoder,
        pool: PagePool,
        library: Library,
        max_tokens: int,
        num_groups: int,
        has_tail: bool,
    ) -> None:
        self.tape, self.has_tail = Tape(library, max_tokens), has_tail
        # Every place that reads a tensor of the step finds the tape, or the number of a group.
        batch = cast("Batch", _RecordedBatch(self.tape))
        attention = cast("Any", TapeAttention(self.tape))
        ctx = ForwardContext(batch, attention, tuple(range(num_groups)), pool)
        last = pool.group_of(model.spec.num_layers - 1)
        tail = Tail(cast("Tensor", self.tape), lambda: last) if has_tail else None
        hidden = cast("object", model.forward(ctx, tail))
        assert isinstance(hidden, Rows)
        self.hidden, self.pointers = hidden, Pointers(num_groups)
        self.tape.end()

    def run(self, batches: tuple[Batch, ...], sent: dict[str, Tensor]) -> Tensor:
        first = batches[0]
        num_tokens, num_samples = first.num_tokens, sent["sample_index"].shape[0]
        assert num_tokens <= self.tape.max_rows, f"{num_tokens} tokens in a step"
        step = self.pointers.step(batches, sent)
        self.tape.replay(step)
        kept = num_samples if self.has_tail else num_tokens
        return self.hidden.memory.view(-1, self.hidden.width)[:kept]


class _RecordedBatch:
    def __init__(self, tape: Tape) -> None:
        self.input_ids = tape

    def __getattr__(self, name: str) -> Any:
        raise NotRecordable(f"the batch's {name} is not recorded")


class Pointers:
    """A step's tensors as addresses."""

    def __init__(self, num_groups: int) -> None:
        self.slots = (ctypes.c_void_p * num_groups)()
        self.tables = (ctypes.c_void_p * num_groups)()

    def step(self, batches: tuple[Batch, ...], sent: dict[str, Tensor]) -> Step:
        first = batches[0]
        for group, batch in enumerate(batches):
            self.slots[group] = _address(batch.slots, torch.int64)
            self.tables[group] = _address(batch.page_table, torch.int32)
        return Step(
            ids=_address(first.input_ids, torch.int64),
            positions=_address(first.positions, torch.int64),
            slots=ctypes.addressof(self.slots),
            tables=ctypes.addressof(self.tables),
            query_starts=_address(first.query_starts, torch.int32),
            context_lens=_address(first.context_lens, torch.int32),
            rows=_address(first.rows, torch.int32),
            sample_index=_address(sent["sample_index"], torch.int64),
            sample_rows=_address(sent["sample_rows"], torch.int32),
            num_tokens=first.num_tokens,
            num_seqs=first.num_seqs,
            num_samples=sent["sample_index"].shape[0],
            table_stride=first.page_table.stride(0),
            page_size=first.page_size,
        )


def _address(tensor: Tensor, dtype: torch.dtype) -> int:
    assert tensor.dtype == dtype and tensor.stride(-1) == 1, (tensor.dtype, tensor.stride())
    return tensor.data_ptr()
