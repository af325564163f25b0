"""Rehearsal: go through a piece of work without its kernels, and compile those side by side.

A kernel compiled when it is first launched keeps everybody waiting; a first start needs some
twenty, a second each. Inside `with rehearsal():` launchers launch nothing. Those that miss a
variant hand it to threads, which compile it, mostly outside the interpreter's lock; when all are
there the block ends with loading them, one after the other. What kernels would have written stays
as it was: a rehearsal's results mean nothing, and its plain torch operations must not follow them
as indices.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["Memory", "Rehearsal", "current_rehearsal", "outline", "rehearsal"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a tensor lies: what compilers and descriptors ask of it, without keeping it alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def outline(arg: object) -> object:
    """An argument without the tensor in it."""
    if isinstance(arg, torch.Tensor):
        return Memory(arg.data_ptr(), arg.dtype)
    if isinstance(arg, TensorDescriptor):
        return replace(arg, base=outline(arg.base))
    return arg


@dataclass(slots=True)
class Rehearsal:
    threads: ThreadPoolExecutor
    jobs: dict[Hashable, tuple[Future[Any], Callable[[Any], None]]] = field(default_factory=dict)
    locks: dict[Hashable, Lock] = field(default_factory=dict)

    def add(
        self,
        key: Hashable,
        kernel: Hashable,
        compile_it: Callable[[], Any],
        keep: Callable[[Any], None],
    ) -> None:
        """`keep` gets what `compile_it` returns, in this thread when all are compiled. Keys that
        may stand for the same compiled `kernel` take turns: the first compiles it, which is no
        single step, the others find it there."""
        if key not in self.jobs:
            lock = self.locks.setdefault(kernel, Lock())
            self.jobs[key] = self.threads.submit(_alone, lock, compile_it), keep

    def settle(self) -> None:
        """Until no thread is at work."""
        wait(job for job, _ in self.jobs.values())


def _alone(lock: Lock, compile_it: Callable[[], Any]) -> Any:
    with lock:
        return compile_it()


_current: ContextVar[Rehearsal | None] = ContextVar("rehearsal", default=None)
current_rehearsal = _current.get


@contextmanager
def rehearsal() -> Iterator[None]:
    """Compile what the block would launch on the current CUDA device."""
    device = torch.cuda.current_device()
    workers = os.cpu_count() or 1
    with ThreadPoolExecutor(workers, "compile", torch.cuda.set_device, (device,)) as threads:
        found = Rehearsal(threads)
        token = _current.set(found)
        try:
            yield
        finally:
            _current.reset(token)
    for job, keep in found.jobs.values():
        if job.exception() is None:
            keep(job.result())
    for job, _ in found.jobs.values():
        job.result()
