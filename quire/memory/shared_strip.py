"""SharedStrip: a strip whose memory engines of other processes on the same device can map.

Torch makes and opens the handles (CUDA IPC); they cross as a typed record of bytes and numbers. The
other side counts itself in shared memory of the host, so both must see the same. What is mapped
stays so as long as somebody has it; a lender that died leaves memory that nobody reads, since its
lease cannot be confirmed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from quire.kv.tier_index import Stored
from quire.memory.strip import Strip, StripRow, runs

SHARED_MEMORY = "/dev/shm"


class CudaHandle(msgspec.Struct, frozen=True):
    """What torch wants to know to map a piece of another process's memory."""

    memory: bytes
    num_bytes: int  # of the whole storage
    offset: int  # of the storage in what is mapped
    counter: bytes
    counter_offset: int
    event: bytes
    waits: bool
    shape: tuple[int, int]


class SharedStrip:
    def __init__(self, strip: Strip) -> None:
        self._strip, self._device = strip, strip.rows.device
        self.name = secrets.token_hex(16)
        uuid = torch.cuda.get_device_properties(self._device).uuid
        self._handle = _handle_of(strip.rows)
        # What has no handle is on a device of its own: nobody asks for it.
        self.device = f"{uuid}/{os.stat(SHARED_MEMORY).st_dev}" if self._handle else self.name

    def bring(self, nodes: Sequence[Stored]) -> list[StripRow]:
        return self._strip.bring(nodes)

    def handle(self) -> bytes:
        return self._handle

    def open(self, handle: bytes) -> Tensor | None:
        """None: memory cannot be mapped here, or its rows are not as ours."""
        try:
            found = msgspec.msgpack.decode(handle, type=CudaHandle)
        except msgspec.DecodeError:
            return None
        rows, width = found.shape
        if width != self._strip.rows.shape[1] or rows * width > found.num_bytes:
            return None
        where = (self._device.index or 0, found.memory, found.num_bytes, found.offset)
        counted = (found.counter, found.counter_offset, found.event, found.waits)
        try:
            with torch.cuda.device(self._device):
                storage = torch.UntypedStorage._new_shared_cuda(*where, *counted)
        except RuntimeError:  # of CUDA: another container, or a driver that does not allow it
            return None
        whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        return whole[: rows * width].view(rows, width)

    def copy(self, mapped: object, rows: Sequence[int]) -> list[StripRow]:
        assert isinstance(mapped, Tensor)
        taken = self._strip.take_many(len(rows))
        own, theirs = [row.index for row in taken], rows[: len(taken)]
        if any(not 0 <= row < len(mapped) for row in theirs):
            return []

        def copy() -> None:
            for begin, end in runs(own, theirs):
                here = self._strip.rows[own[begin] : own[begin] + end - begin]
                here.copy_(mapped[theirs[begin] : theirs[begin] + end - begin], non_blocking=True)

        self._strip.lane.do(copy)
        self._strip.lane.mark().wait()
        return taken


def _handle_of(rows: Tensor) -> bytes:
    """Empty: this memory cannot be shared."""
    try:
        made = rows.untyped_storage()._share_cuda_()
    except RuntimeError:  # an allocator, a driver or a system without it
        return b""
    _, memory, num_bytes, offset, counter, counter_offset, event, waits = made
    shape = (rows.shape[0], rows.shape[1])
    fields = (memory, num_bytes, offset, counter, counter_offset, event, waits, shape)
    return msgspec.msgpack.encode(CudaHandle(*fields))
