"""The CPU's name and those of its abilities on which the speed of an engine depends."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import NamedTuple

CPU_INFO = Path("/proc/cpuinfo")
# As Linux names them: x86, then Arm.
TELLING = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)


class Cpu(NamedTuple):
    name: str
    flags: tuple[str, ...]

    def describe(self) -> str:
        """
        >>> Cpu("EPYC", ("avx2", "fma")).describe()
        'EPYC (avx2 fma)'
        """
        return f"{self.name} ({' '.join(self.flags) or 'no vector flags known'})"


def this_cpu() -> Cpu:
    try:
        return cpu_of(CPU_INFO.read_text(encoding="utf-8", errors="replace"))
    except OSError:  # not Linux
        return Cpu(platform.processor() or platform.machine(), ())


def cpu_of(info: str) -> Cpu:
    """From the text of /proc/cpuinfo; the first processor stands for all."""
    fields: dict[str, str] = {}
    for line in info.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    flags = set(fields.get("flags", fields.get("features", "")).split())
    name = fields.get("model name") or platform.machine()
    return Cpu(name, tuple(flag for flag in TELLING if flag in flags))
