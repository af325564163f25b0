"""Device facts: which device, which dtype, how much memory; the CPU answers as CUDA does."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

from quire.errors import NotSupported

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


def pick_device(name: str) -> tuple[torch.device, str]:
    """The device and why; of a list of GPUs the first rank's. `dist/devices.py` says what names
    there are."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda"), f"found {torch.cuda.get_device_name()}"
        return torch.device("cpu"), "no CUDA device was found"
    if name != "cpu" and not torch.cuda.is_available():
        raise NotSupported(f"got device={name!r}, but torch sees no CUDA device; use device='cpu'")
    return torch.device(name.split(",")[0]), "asked for"


def pick_dtype(name: str, stored: str, device: torch.device) -> tuple[torch.dtype, str]:
    if name == "auto":
        if device.type == "cpu":
            return torch.float32, "fastest and exact on CPUs without bf16 units"
        if stored in ("float16", "bfloat16"):
            return DTYPES[stored], "as stored"
        return torch.bfloat16, f"{stored} checkpoints run in bf16 on CUDA"
    return DTYPES[name], "asked for"


def total_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return min(int(line.split()[1]) * 1024, _container_room())
    except OSError:
        pass
    return total_memory(device) // 2  # no /proc: assume half is ours


def _container_room() -> int:
    """What the memory limit of this container still leaves; unlimited without one."""
    try:
        group = Path("/sys/fs/cgroup")
        files = [(group / f"memory.{name}").read_text() for name in ("max", "current", "stat")]
        limit, used, stat = int(files[0]), int(files[1]), files[2]
    except (OSError, ValueError):  # no cgroup v2, or the limit is "max"
        return 1 << 62
    cache = next((int(x.split()[1]) for x in stat.splitlines() if x.startswith("inactive_file")), 0)
    return max(0, limit - used + cache)


def peak_memory(device: torch.device) -> int:
    """Most bytes held at once: by torch since `reset_peak`, or by this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak(device: torch.device) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
