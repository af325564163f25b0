"""Vault: weights and pages of an engine in memory of a GPU that can be left and taken again.

torch allocates what is made inside of `weights` and `pages` through `native/device/vault.c`, which
reserves addresses and maps memory behind them. `leave` copies the weights to locked memory of the
host and gives everything back; `take` maps new memory at the same addresses and brings the weights
back, so tensors, descriptors and captured graphs stay what they were. Pages come back as zeros.
When to do either is `engine/parking.py`'s.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_char_p, c_int, c_size_t, c_uint64, c_void_p

import torch

from quire.env import has_allocator_settings
from quire.errors import NotSupported, OutOfMemory
from quire.memory.sizing import size_text
from quire.native.build import ensure_device_built

DRIVER = "libcuda.so.1"
SHORT = 2  # the driver's word for too little memory
LARGE_MB = 64
UNLIMITED_MB = 1 << 20  # as torch begins: blocks of any size are cut
_tags = itertools.count()


class Vault:
    def __init__(self, device: torch.device) -> None:
        """Raises NotSupported where torch, the driver or a compiler is not up to it."""
        self._copy, self._copy_bytes = c_void_p(), 0  # on the host
        for name in ("MemPool", "use_mem_pool", "CUDAPluggableAllocator"):
            if not hasattr(torch.cuda.memory, name):
                raise NotSupported(f"torch {torch.__version__} has no torch.cuda.memory.{name}")
        path = str(ensure_device_built())
        self._c = bound(path)
        if (missing := self._c.qv_open(DRIVER.encode())) is not None:
            raise NotSupported(f"{missing.decode()} was not found")
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)  # torch wants to know which
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "qv_alloc", "qv_free")
        self._weights, self._pages = next(_tags), next(_tags)
        self.spare = 0  # bytes that were taken with the weights and hold none

    def __del__(self) -> None:
        if self._copy_bytes:
            self._c.qv_host_free(self._copy)

    # ------------------------------------------------------------ making

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Tensors that this thread makes within are kept when the memory is left."""
        _settle_libraries(self._device)
        before = torch.cuda.memory_allocated(self._device)
        with _large_blocks_whole(), self._made_with(self._weights):
            yield
        held = torch.cuda.memory_allocated(self._device) - before
        self.spare = max(0, self.weight_bytes - held)

    @contextmanager
    def pages(self) -> Iterator[None]:
        """The same; they come back as zeros."""
        with self._made_with(self._pages):
            yield

    @contextmanager
    def _made_with(self, tag: int) -> Iterator[None]:
        torch.cuda.empty_cache()  # within, torch gives nothing back, even when memory is short
        with torch.cuda.device(self._device):
            pool = torch.cuda.MemPool(self._allocator.allocator())
        self._c.qv_tag(tag)
        try:
            with torch.cuda.use_mem_pool(pool, self._device):
                yield
        finally:
            self._c.qv_tag(-1)
            # Whoever looks at what is free shall not count what was only passing. torch gives it
            # back to us once the pool is closed; what tensors have stays theirs.
            torch.cuda.synchronize(self._device)
            del pool
            torch.cuda.empty_cache()

    # ------------------------------------------------------------ leaving

    @property
    def weight_bytes(self) -> int:
        return int(self._c.qv_bytes(self._weights))

    @property
    def page_bytes(self) -> int:
        return int(self._c.qv_bytes(self._pages))

    @property
    def has_copy(self) -> bool:
        """Whether memory of the host is there for the weights; once had it is kept."""
        return self._copy_bytes >= self.weight_bytes

    def leave(self) -> None:
        """Give the memory back. Raises OutOfMemory when the host has none for the weights."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device):
            self._make_copy()
            self._check("copying weights to the host", self._c.qv_save(self._weights, self._copy))
            for tag in (self._weights, self._pages):
                self._check("giving memory back", self._c.qv_drop(tag))
            torch.cuda.empty_cache()

    def take(self) -> None:
        """Raises OutOfMemory when the GPU has too little; then nothing has changed."""
        with torch.cuda.device(self._device):
            self._map()
            self._check("bringing weights back", self._c.qv_fill(self._weights, self._copy))
            self._check("emptying pages", self._c.qv_fill(self._pages, None))

    def _map(self) -> None:
        needed = self.weight_bytes + self.page_bytes
        free = torch.cuda.mem_get_info(self._device)[0]
        result = SHORT if needed > free else self._c.qv_map(self._weights)
        if not result and (result := self._c.qv_map(self._pages)):
            self._check("giving memory back", self._c.qv_drop(self._weights))
        if result == SHORT:
            raise OutOfMemory(
                f"weights and pages need {size_text(needed)} of GPU memory, {size_text(free)} are"
                " free"
            )
        self._check("taking memory", result)

    def _make_copy(self) -> None:
        if self.has_copy:
            return
        size, at = self.weight_bytes, c_void_p()
        if result := self._c.qv_host_alloc(ctypes.byref(at), size):
            raise OutOfMemory(
                f"{size_text(size)} of locked host memory for the weights: {self._error(result)}"
            )
        self._copy, self._copy_bytes = at, size

    def _check(self, what: str, result: int) -> None:
        if result:  # what the memory holds now nobody knows
            raise RuntimeError(f"{what} in process {os.getpid()}: {self._error(result)}")

    def _error(self, result: int) -> str:
        text: bytes = self._c.qv_error(result)
        return text.decode()


@contextmanager
def _large_blocks_whole() -> Iterator[None]:
    """torch does not put small weights into what is left of a large block that was only passing: it
    would be held, copied and counted with them. Not where the user has settings of their own, which
    these would replace."""
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is None or has_allocator_settings():
        yield
        return
    change(f"max_split_size_mb:{LARGE_MB}")
    try:
        yield
    finally:
        change(f"max_split_size_mb:{UNLIMITED_MB}")


def _settle_libraries(device: torch.device) -> None:
    """What torch's products keep for themselves is no weight: have it made before there are any."""
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.ones(16, 16, dtype=dtype, device=device)
        torch.nn.functional.linear(x, x, x[0])
        torch.matmul(x, x)


def bound(path: str) -> ctypes.CDLL:
    """The functions of `vault.c`; each is called without the GIL."""
    library = ctypes.CDLL(path)
    text, result = c_char_p, c_int
    signatures = {
        "qv_open": (text, (c_char_p,)),
        "qv_error": (text, (c_int,)),
        "qv_tag": (None, (c_int,)),
        "qv_bytes": (c_uint64, (c_int,)),
        "qv_drop": (result, (c_int,)),
        "qv_map": (result, (c_int,)),
        "qv_save": (result, (c_int, c_void_p)),
        "qv_fill": (result, (c_int, c_void_p)),
        "qv_host_alloc": (result, (c_void_p, c_size_t)),
        "qv_host_free": (result, (c_void_p,)),
    }
    for name, (given, taken) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = given, taken
    return library
