"""Tapes: steps on a CPU as one native call each, where every layer of the model can be recorded.

Two recordings of the same model: all rows to the end, or only those that are read (`tail.py`). A
row's bits are the same in both. A model that cannot be recorded runs layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from quire.attn.backend import AttentionBackend
from quire.attn.latent_native import LatentNative
from quire.attn.native import NativeAttention
from quire.dist.homes import StepHomes
from quire.forward import Batch, ForwardContext, Tail, Taps, stream_of
from quire.lora.recorded import RecordedAdapters
from quire.lora.step import StepAdapters
from quire.memory.pool import PagePool
from quire.models.decoder import Decoder
from quire.native.heads import StepPointers, address_of
from quire.native.tape import NotRecordable, OwnStep, Positions, Rows, Step, Tape
from quire.runner.home_pages import HomeRows


class Tapes:
    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        pool: PagePool,
        max_tokens: int,
        taps: tuple[int, ...] = (),
    ) -> None:
        """`taps`: layers whose input stays to be read. Raises NotRecordable."""
        if not isinstance(attention, (NativeAttention, LatentNative)):
            raise NotRecordable(f"{type(attention).__name__} is not native")
        if any(map(model.spec.is_sparse, model.layers)):
            with torch.inference_mode(False):  # whoever reads the counters sets them to zero
                model.count_expert_loads()
        tape = partial(Tape, attention.library, max_tokens)
        self._record = partial(_Recording, model, attention, pool, tape, taps)
        self._has_end = model.stage.is_last  # and may leave out rows there
        self.whole = self._record(False)
        self.tail = self._record(True) if self._has_end else self.whole
        self._last = self.whole  # the recording that ran last
        self.adapters: RecordedAdapters | None = None  # set by the engine
        self._adapted: dict[bool, _Recording] = {}  # with a tail or not; from the first step on

    def run(
        self,
        batches: tuple[Batch, ...],
        sent: dict[str, Tensor],
        has_tail: bool,
        adapted: StepAdapters | None = None,
        incoming: Sequence[Tensor] = (),
        own: HomeRows | None = None,
        stop: int = 0,
    ) -> tuple[Tensor, ...]:
        """Hidden states after the last norm: of all tokens, or of those drawn from alone. On a
        stage before the last, the stream that the next one goes on with.

        They stay until the next step. `stop` is the address of an urge (`native/urge.py`), for a
        step that may be given up. Raises GivenUp."""
        self._last = self._recording(has_tail and self._has_end, adapted is not None)
        return self._last.run(batches, sent, adapted, incoming, own, stop)

    def _recording(self, has_tail: bool, is_adapted: bool) -> _Recording:
        if not is_adapted:
            return self.tail if has_tail else self.whole
        if has_tail not in self._adapted:
            assert self.adapters is not None
            self._adapted[has_tail] = self._record(has_tail, self.adapters)
        return self._adapted[has_tail]

    def streams(self, num_tokens: int) -> tuple[Tensor, ...]:
        """What the taps hold of the step that ran last, [tokens, hidden] each; until the next."""
        rows = self._last.streams
        return tuple(_tensor(held, num_tokens) for held in rows)


class _Recording:
    def __init__(
        self,
        model: Decoder,
        attention: NativeAttention | LatentNative,
        pool: PagePool,
        new_tape: Callable[[], Tape],
        taps: tuple[int, ...],
        has_tail: bool,
        adapters: RecordedAdapters | None = None,
    ) -> None:
        self.tape, self.has_tail = new_tape(), has_tail
        num_groups = len(pool.groups)
        # Every place that reads a tensor of the step finds the tape, or the number of a group.
        batch = cast("Batch", RecordedBatch(self.tape))
        plans = tuple(attention.recorded_plan(group, batch) for group in range(num_groups))
        tapped = Taps(tuple(i for i in taps if not has_tail or i < model.spec.num_layers))
        # The memory of these is nobody else's: filled before each step, or read after it.
        hidden, count = model.spec.hidden_size, 0 if model.stage.is_first else model.stream_parts
        self.incoming = [self.tape.rows(hidden, False) for _ in range(count)]
        homes = RecordedHomes(self.tape) if model.ranks.has_homes else None
        ctx = ForwardContext(
            batch,
            cast("AttentionBackend", attention),
            plans,
            pool,
            tapped,
            adapters,
            stream_of(cast("list[Tensor]", self.incoming)) if self.incoming else None,
            homes,
        )
        if model.stage.is_last:
            last = plans[pool.group_of(model.layers[-1])]
            tail = Tail(cast("Tensor", self.tape), lambda: last, homes) if has_tail else None
            made: tuple[object, ...] = (model.forward(ctx, tail),)
        else:
            made = model.pass_on(ctx)
        self.results = [rows for rows in made if isinstance(rows, Rows)]
        self.pointers, self.own_pointers = StepPointers(num_groups), StepPointers(num_groups)
        self.streams = cast("tuple[Rows, ...]", tapped.taken())  # their memory is nobody else's
        self.tape.end()

    def run(
        self,
        batches: tuple[Batch, ...],
        sent: dict[str, Tensor],
        adapted: StepAdapters | None = None,
        incoming: Sequence[Tensor] = (),
        own: HomeRows | None = None,
        stop: int = 0,
    ) -> tuple[Tensor, ...]:
        first = batches[0]
        num_tokens, num_samples = first.num_tokens, sent["sample_index"].shape[0]
        assert num_tokens <= self.tape.max_rows, f"{num_tokens} tokens in a step"
        slots = None if adapted is None else adapted.slots()
        whole = _Inputs(batches, sent["sample_index"], sent["sample_rows"], slots)
        for rows, came in zip(self.incoming, incoming, strict=True):
            _tensor(rows, num_tokens).copy_(came)
        part = None if own is None else whole.part(own)  # alive while the step runs
        ours = None
        if own is not None and part is not None:
            ours = OwnStep(part.step(self.own_pointers), own.tokens, own.samples)
        step = whole.step(self.pointers)
        step.stop = stop
        self.tape.replay(step, first.input_ids, ours)
        kept = num_samples if self.has_tail else num_tokens
        return tuple(_tensor(rows, kept) for rows in self.results)


class _Inputs(NamedTuple):
    """What a step's operations read besides rows."""

    batches: tuple[Batch, ...]
    sample_index: Tensor
    sample_rows: Tensor
    slots: tuple[Tensor, Tensor] | None  # of the adapters of each token, and of each sample

    def part(self, own: HomeRows) -> _Inputs:
        slots = self.slots
        if slots is not None:
            slots = own.tokens.take(slots[0]), own.samples.take(slots[1])
        batches = tuple(map(own.batch, self.batches))
        samples = own.places(self.sample_index), own.samples.take(self.sample_rows)
        return _Inputs(batches, *samples, slots)

    def step(self, pointers: StepPointers) -> Step:
        """All of this must outlive it."""
        step = pointers.step(self.batches)
        step.sample_index = address_of(self.sample_index, torch.int64)
        step.sample_rows = address_of(self.sample_rows, torch.int32)
        step.num_samples = len(self.sample_index)
        if self.slots is not None:
            step.adapters, step.sample_adapters = (address_of(s, torch.int32) for s in self.slots)
        return step


def _tensor(rows: Rows, count: int) -> Tensor:
    return rows.memory.view(-1, rows.width)[:count]


class RecordedHomes:
    """`dist.homes.Homes`, for a recording: whose rows are whose is the replayed step's to say."""

    has_own = True

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def take(self, x: Tensor) -> Tensor:
        """What is recorded from here on is of our rows, until they are gathered."""
        self._tape.is_own = True
        return self._between(x, StepHomes.take)

    def gather(self, own: Tensor) -> Tensor:
        self._tape.is_own = False
        return self._between(own, StepHomes.gather)

    def _between(self, x: Tensor, make: Callable[[StepHomes, Tensor], Tensor]) -> Tensor:
        tape, rows = self._tape, cast("Rows", x)
        of_samples = rows.of_samples

        def made(now: Tensor) -> Tensor:
            assert tape.own is not None, "a step without homes"
            return make(tape.own.samples if of_samples else tape.own.tokens, now)

        return cast("Tensor", tape.pause(made, rows.width, (rows,)))


class RecordedBatch:
    """Stands in for a step's batch while a model is recorded."""

    def __init__(self, tape: Tape) -> None:
        self.input_ids, self.positions = tape, Positions(tape)

    def __getattr__(self, name: str) -> Any:
        raise NotRecordable(f"the batch's {name} is not recorded")
