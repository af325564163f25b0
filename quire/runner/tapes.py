"""Tapes: steps on a CPU as one native call each, where every layer of the model can be recorded.

Two recordings of the same model: all rows to the end, or only those that are read (`tail.py`). A
row's bits are the same in both. A model that cannot be recorded runs layer by layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from quire.attn.backend import AttentionBackend
from quire.attn.latent_native import LatentNative
from quire.attn.native import NativeAttention
from quire.forward import Batch, ForwardContext, Tail
from quire.lora.recorded import RecordedAdapters
from quire.lora.step import StepAdapters
from quire.memory.pool import PagePool
from quire.models.decoder import Decoder
from quire.native.heads import StepPointers, address_of
from quire.native.tape import NotRecordable, Positions, Rows, Tape


class Tapes:
    def __init__(
        self, model: Decoder, attention: AttentionBackend, pool: PagePool, max_tokens: int
    ) -> None:
        """Raises NotRecordable."""
        if not isinstance(attention, (NativeAttention, LatentNative)):
            raise NotRecordable(f"{type(attention).__name__} is not native")
        if any(map(model.spec.is_sparse, range(model.spec.num_layers))):
            with torch.inference_mode(False):  # whoever reads the counters sets them to zero
                model.count_expert_loads()
        self._record = partial(_Recording, model, attention, pool, max_tokens)
        self.whole, self.tail = self._record(False), self._record(True)
        self.adapters: RecordedAdapters | None = None  # set by the engine
        self._adapted: dict[bool, _Recording] = {}  # with a tail or not; from the first step on

    def run(
        self,
        batches: tuple[Batch, ...],
        sent: dict[str, Tensor],
        has_tail: bool,
        adapted: StepAdapters | None = None,
    ) -> Tensor:
        """Hidden states after the last norm: of all tokens, or of those drawn from alone.

        They stay until the next step."""
        if adapted is None:
            recording = self.tail if has_tail else self.whole
            return recording.run(batches, sent)
        if has_tail not in self._adapted:
            assert self.adapters is not None
            self._adapted[has_tail] = self._record(has_tail, self.adapters)
        return self._adapted[has_tail].run(batches, sent, adapted)


class _Recording:
    def __init__(
        self,
        model: Decoder,
        attention: NativeAttention | LatentNative,
        pool: PagePool,
        max_tokens: int,
        has_tail: bool,
        adapters: RecordedAdapters | None = None,
    ) -> None:
        self.tape, self.has_tail = Tape(attention.library, max_tokens), has_tail
        num_groups = len(pool.groups)
        # Every place that reads a tensor of the step finds the tape, or the number of a group.
        batch = cast("Batch", _RecordedBatch(self.tape))
        plans = tuple(attention.recorded_plan(group, batch) for group in range(num_groups))
        ctx = ForwardContext(batch, cast("AttentionBackend", attention), plans, pool, adapters)
        last = plans[pool.group_of(model.spec.num_layers - 1)]
        tail = Tail(cast("Tensor", self.tape), lambda: last) if has_tail else None
        hidden = cast("object", model.forward(ctx, tail))
        assert isinstance(hidden, Rows)
        self.hidden, self.pointers = hidden, StepPointers(num_groups)
        self.tape.end()

    def run(
        self,
        batches: tuple[Batch, ...],
        sent: dict[str, Tensor],
        adapted: StepAdapters | None = None,
    ) -> Tensor:
        first = batches[0]
        num_tokens, num_samples = first.num_tokens, sent["sample_index"].shape[0]
        assert num_tokens <= self.tape.max_rows, f"{num_tokens} tokens in a step"
        step = self.pointers.step(batches)
        step.sample_index = address_of(sent["sample_index"], torch.int64)
        step.sample_rows = address_of(sent["sample_rows"], torch.int32)
        step.num_samples = num_samples
        slots = None if adapted is None else adapted.slots()  # alive while the step runs
        if slots is not None:
            step.adapters, step.sample_adapters = (address_of(s, torch.int32) for s in slots)
        self.tape.replay(step)
        kept = num_samples if self.has_tail else num_tokens
        return self.hidden.memory.view(-1, self.hidden.width)[:kept]


class _RecordedBatch:
    def __init__(self, tape: Tape) -> None:
        self.input_ids, self.positions = tape, Positions(tape)

    def __getattr__(self, name: str) -> Any:
        raise NotRecordable(f"the batch's {name} is not recorded")
