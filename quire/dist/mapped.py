"""Memory of a GPU that processes map into each other (CUDA IPC). A handle is plain bytes.

CUDA's own calls, since torch keeps what it has shared until every process that mapped it has said
that it is done with it, and a rank that was killed says nothing. Memory is given back when nobody
has the `OwnMemory`; what others have mapped of it stays until they unmap it.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import suppress
from ctypes import byref, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

import torch

from quire.errors import RankLost

HANDLE_BYTES = 64
ENABLE_PEER_ACCESS = 1  # where the memory is on another GPU


class Handle(ctypes.Structure):
    """`CUipcMemHandle`."""

    _fields_ = (("reserved", c_ubyte * HANDLE_BYTES),)


def _driver() -> Any:
    """Loaded once by torch; this finds it again."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RankLost(f"memory of a GPU cannot be shared: {error}") from error
    driver.cuMemAlloc_v2.argtypes = (c_void_p, c_size_t)
    driver.cuMemFree_v2.argtypes = (c_uint64,)
    driver.cuMemsetD8_v2.argtypes = (c_uint64, c_ubyte, c_size_t)
    driver.cuIpcGetMemHandle.argtypes = (c_void_p, c_uint64)
    driver.cuIpcOpenMemHandle_v2.argtypes = (c_void_p, Handle, c_uint)
    driver.cuIpcCloseMemHandle.argtypes = (c_uint64,)
    return driver


def _call(verb: Any, *args: object) -> None:
    if code := verb(*args):
        raise RankLost(f"{verb.__name__} failed with error {code} of CUDA")


class OwnMemory:
    """Zeros, for this process and whoever gets the handle."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._driver, found = _driver(), c_uint64()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # the thread has the device's context now
            _call(self._driver.cuMemAlloc_v2, byref(found), num_bytes)
            self.address = found.value
            weakref.finalize(self, _quietly, self._driver.cuMemFree_v2, found)
            _call(self._driver.cuMemsetD8_v2, self.address, 0, num_bytes)
            torch.cuda.synchronize()

    def handle(self) -> bytes:
        made = Handle()
        _call(self._driver.cuIpcGetMemHandle, byref(made), self.address)
        return bytes(made.reserved)


class MappedMemory:
    """Of another process, as long as somebody has this."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        """For kernels on `device`."""
        assert len(handle) == HANDLE_BYTES, f"got a handle of {len(handle)} bytes"
        driver, found = _driver(), c_uint64()
        opened = Handle((c_ubyte * HANDLE_BYTES)(*handle))
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()
            _call(driver.cuIpcOpenMemHandle_v2, byref(found), opened, ENABLE_PEER_ACCESS)
        self.address = found.value
        weakref.finalize(self, _quietly, driver.cuIpcCloseMemHandle, found)


def _quietly(verb: Any, address: c_uint64) -> None:
    """At the end of a process there may be no device any more."""
    with suppress(RankLost):
        _call(verb, address)


def can_be_shared(device: torch.device) -> bool:
    """Whether other processes could map memory of this GPU."""
    try:
        OwnMemory(HANDLE_BYTES, device).handle()
    except RankLost:
        return False
    return True
