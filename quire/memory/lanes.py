"""Lanes: orders of work on a device, and marks in them that other lanes or threads wait for.

A lane is a CUDA stream. What is done in one lane happens in order; between lanes only `after` says
what comes first. This file holds all that only a card can prove; `tests/lanes.py` has a twin that
does its work as late as it may, so that a forgotten `after` shows on any machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.kv.tier_index import Landing

NUMBERS = 1 << 16  # numbers on their way to the device: some twenty steps of the largest prompts


class Lane(Protocol):
    def do(self, work: Callable[[], None]) -> None:
        """Launch this when everything before it in the lane is done; returns at once."""
        ...

    def after(self, mark: Landing) -> None:
        """What comes next in this lane waits for a mark of another one."""
        ...

    def mark(self) -> Landing:
        """The end of what is in the lane now."""
        ...


class Lanes(NamedTuple):
    """`compute` belongs to the thread that steps, the others to whoever moves pages."""

    compute: Lane
    saving: Lane
    loading: Lane


class CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking: a thread that waits sleeps instead of taking the engine's turns.
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def is_over(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaLane:
    def __init__(self, stream: torch.cuda.Stream | None, device: torch.device) -> None:
        """None: whatever stream the calling thread computes on."""
        self._stream, self._device = stream, device

    def _now(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream(self._device)

    def do(self, work: Callable[[], None]) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._now()):
            work()

    def after(self, mark: Landing) -> None:
        assert isinstance(mark, CudaMark), f"got {type(mark).__name__} of another kind of lane"
        self._now().wait_event(mark.event)

    def mark(self) -> CudaMark:
        return CudaMark(self._now())


def cuda_lanes(device: torch.device) -> Lanes:
    """Copies in both directions at once: the bus has a way for each."""
    saving, loading = torch.cuda.Stream(device), torch.cuda.Stream(device)
    return Lanes(CudaLane(None, device), CudaLane(saving, device), CudaLane(loading, device))


class Ring:
    """Places that are taken in turn and given back in the same order.

    >>> ring = Ring(10)
    >>> ring.take(6), ring.take(6), ring.take(4)
    (0, None, 6)
    >>> ring.give_back()
    >>> ring.take(5), ring.take(2)
    (0, None)
    """

    def __init__(self, size: int) -> None:
        self._size, self._at, self._num_used = size, 0, 0
        self._widths: deque[int] = deque()  # of what is taken, the oldest first

    def take(self, num: int) -> int | None:
        """Where so many begin; None: they are still in use."""
        wraps = self._at + num > self._size
        skipped = self._size - self._at if wraps else 0
        if self._num_used + skipped + num > self._size:
            return None
        begin = 0 if wraps else self._at
        self._at = begin + num
        self._num_used += skipped + num
        self._widths.append(skipped + num)
        return begin

    def give_back(self) -> None:
        """The oldest."""
        self._num_used -= self._widths.popleft()


class IntSender:
    """Brings numbers to the device from locked memory that is used again, for one thread.

    Torch's own allocator asks the driver for more where many copies wait in a lane, and the driver
    may make the thread wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        size = NUMBERS if self._is_cuda else 0
        self._memory = torch.empty(size, dtype=torch.int64, pin_memory=self._is_cuda)
        self._ring, self._under_way = Ring(size), deque[torch.cuda.Event]()

    def send(self, numbers: list[int]) -> Tensor:
        """[numbers] int64 on the device, in the lane that calls; nobody waits."""
        host = torch.tensor(numbers, dtype=torch.int64)
        if not self._is_cuda:
            return host
        while self._under_way and self._under_way[0].query():
            self._under_way.popleft()
            self._ring.give_back()
        begin = self._ring.take(len(numbers))
        if begin is None:
            return host.pin_memory().to(self._device, non_blocking=True)
        sent = self._memory[begin : begin + len(numbers)].copy_(host)
        sent = sent.to(self._device, non_blocking=True)
        self._under_way.append(torch.cuda.Event())
        self._under_way[-1].record()
        return sent


def register(address: int, num_bytes: int) -> str:
    """Lock memory of the host in place for copies that nobody waits for; what went wrong, if
    anything did."""
    code = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
    return "" if int(code) == 0 else f"cudaHostRegister says {code}"


def unregister(address: int) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)
