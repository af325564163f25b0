"""Rehearsal: run a piece of work without launching its kernels, and compile them side by side.

A first start compiles some twenty kernels, and each takes about a second. Inside
`with rehearsal():` launchers launch nothing. A launcher without the right variant hands it to
threads, which compile it, mostly outside the interpreter's lock. At the end of the block all are
loaded, one after the other. Kernels write nothing in a rehearsal. So its results mean nothing, and
its plain torch operations must not use them as indices.
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
    """A tensor's address and dtype, for compilers and descriptors; does not keep it alive."""

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
        """`keep` gets what `compile_it` returns, in this thread, once everything is compiled.

        Keys of the same `kernel` take turns: the first one compiles it, the others find it on
        disk. Compiling is not atomic, so they must not run at once."""
        if key not in self.jobs:
            lock = self.locks.setdefault(kernel, Lock())
            self.jobs[key] = self.threads.submit(_alone, lock, compile_it), keep

    def settle(self) -> None:
        """Wait until no thread is at work."""
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
