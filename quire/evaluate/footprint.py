"""What a loaded model costs: bytes of its files, of its weights in memory, of the process, speed.

Weights are counted where they lie: every tensor that the model reaches, once. So a copy that
somebody forgot shows here.
"""

from __future__ import annotations

import ctypes
import gc
import types
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.bench.offline import measure_latency
from quire.llm import LLM
from quire.load.hub import file_bytes, resolve_model
from quire.native.exchange import SharedComm
from quire.nn.attention import RopeTables

NOT_WEIGHTS = (RopeTables, SharedComm, type, types.ModuleType)
PROMPT, ANSWER, REPEATS = 32, 48, 2  # of the request whose speed is measured


@dataclass(frozen=True, slots=True)
class Footprint:
    disk_bytes: int
    weight_bytes: int
    peak_bytes: int | None  # above what the process held before; None: this system does not tell
    decode_tok_s: float


class MemoryWatch:
    """How far memory rises from here on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        self._before: int | None = None
        if device.type == "cpu":
            _return_freed()
            self._before = _status("VmRSS") if _forget_peak() else None

    def peak(self) -> int | None:
        """None where it cannot be told: a GPU's cache takes whatever memory weights leave."""
        if self._before is None:
            return None
        now = _status("VmHWM")
        return None if now is None else max(0, now - self._before)


def _forget_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _return_freed() -> None:
    """What was freed and is kept for the next allocation would hide a rise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return next((int(kilobytes) * 1024 for kilobytes in found), None)


def footprint(llm: LLM, watch: MemoryWatch) -> Footprint:
    """Runs a request, so that the peak has a decode in it."""
    speed = measure_latency(llm, PROMPT, ANSWER, REPEATS).decode_tok_s
    model = llm._engine.runner.model
    disk = file_bytes(resolve_model(llm.args.model))
    return Footprint(disk, resident_bytes(model), watch.peak(), speed)


def resident_bytes(root: object) -> int:
    """Bytes of all tensors reachable from a model or a part of it, but tables of positions and
    memory that ranks talk through."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, NOT_WEIGHTS):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            key, size = _storage(one)
            storages[key] = size
        else:
            waiting += _inside(one)
    return sum(storages.values())


def _storage(tensor: Tensor) -> tuple[int, int]:
    if tensor.layout != torch.strided:  # a library's own packing, which shows no storage
        return id(tensor), tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _inside(one: object) -> list[object]:
    if isinstance(one, dict):
        return list(one.values())
    if isinstance(one, (list, tuple, set, frozenset)):
        return list(one)
    if isinstance(one, types.FunctionType):
        return [cell.cell_contents for cell in one.__closure__ or ()]
    if isinstance(one, types.MethodType):
        return [one.__self__]
    if not type(one).__module__.startswith("quire."):
        return []
    slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
    held = [getattr(one, name) for name in slots if hasattr(one, name)]
    return held + list(getattr(one, "__dict__", {}).values())
