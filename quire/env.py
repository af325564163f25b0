"""Every environment variable Quire reads, in one place, typed.

Settings that change what the engine does belong in `EngineArgs`; these only say where things are
and what may be touched. Nothing else in the package reads the environment.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.errors import NotSupported

MAX_PACK_GIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    meaning: str


VARIABLES = (
    Variable("QUIRE_CACHE", "folder for downloaded models; default: XDG_CACHE_HOME/quire"),
    Variable("XDG_CACHE_HOME", "the user's cache folder; default: ~/.cache"),
    Variable("QUIRE_API_KEY", "a key clients of `quire serve` must send"),
    Variable("QUIRE_ADMIN_API_KEY", "a key for the admin verbs of `quire serve`"),
    Variable("QUIRE_OFFLINE", "1: never use the network, only what is cached"),
    Variable(
        "QUIRE_CPU_ISA",
        "instruction set of the native kernels, or torch for none of them; default: the best",
    ),
    Variable(
        "QUIRE_PACK_GIB",
        "GiB of packed weights kept in the cache folder, 0 for none of them; default: 16",
    ),
    Variable("CUDA_VISIBLE_DEVICES", "GPUs, divided among `--replicas`; default: all"),
    Variable("PYTORCH_ALLOC_CONF", "torch's own; a model that parks leaves what is set as it is"),
    Variable("PYTORCH_CUDA_ALLOC_CONF", "its older name"),
)


def has_allocator_settings() -> bool:
    """Whether the user has told torch how to allocate memory of GPUs."""
    newer, older = os.environ.get("PYTORCH_ALLOC_CONF"), os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    return bool(newer or older)


def cache_folder() -> Path:
    """Where downloads are kept; may not exist yet."""
    if own := os.environ.get("QUIRE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "quire"
    return Path.home() / ".cache" / "quire"


def leave_ends_to_us() -> None:
    """Of groups that talk over NCCL, made from now on: torch shall not end this process when a
    collective is late, nor when its own watch is. `dist/nccl.py` has an end for both. Nor shall
    ranks tell each other of tensors while a graph is captured: one of them may fail to."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    os.environ["NCCL_GRAPH_REGISTER"] = "0"


def api_key() -> str | None:
    return os.environ.get("QUIRE_API_KEY", "").strip() or None


def admin_key() -> str | None:
    return os.environ.get("QUIRE_ADMIN_API_KEY", "").strip() or None


def visible_gpus() -> str | None:
    """A list of GPUs that processes may see; None: all of the machine."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def of_child(admin_key: str, gpus: Sequence[str] = ()) -> dict[str, str]:
    """This process's environment, for a child that has this admin key and sees these GPUs alone;
    those that we see where there are none."""
    made = dict(os.environ)
    if admin_key:
        made["QUIRE_ADMIN_API_KEY"] = admin_key
    if gpus:
        made["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return made


def is_offline() -> bool:
    return os.environ.get("QUIRE_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on")


def cpu_isa() -> str | None:
    return os.environ.get("QUIRE_CPU_ISA", "").strip() or None


def pack_limit() -> int:
    """In bytes."""
    asked = os.environ.get("QUIRE_PACK_GIB", "").strip() or "16"
    try:
        limit = float(asked)
    except ValueError:
        limit = math.nan
    if not 0 <= limit <= MAX_PACK_GIB:
        raise NotSupported(
            f"got QUIRE_PACK_GIB={asked!r}, want a number of GiB from 0 to {MAX_PACK_GIB}"
        )
    return int(limit * (1 << 30))


def ask_for_one_blas() -> None:
    """Let torch start with the matrix library whose sums do not depend on the batch (see
    `kernels/vendor_matmul.py`); asking later works too, but torch then warns."""
    os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")
