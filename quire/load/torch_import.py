"""begin_import: torch is imported in a thread while the model's header and vocabulary are read.

A fifth of that import is the dynamic linker's work on one large library. An import statement holds
the interpreter's lock meanwhile, a foreign call to `dlopen` does not, so the library is opened that
way first. Whoever imports torch next waits for the thread. What goes wrong here is left to that
import, which says why.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread

# As torch itself opens them, in its order: what all libraries may see, then the large one.
LIBRARIES = (
    ("libtorch_global_deps.so", ctypes.RTLD_GLOBAL),
    ("libtorch_cpu.so", ctypes.RTLD_LOCAL),
)


def begin_import() -> None:
    if "torch" in sys.modules or (spec := importlib.util.find_spec("torch")) is None:
        return
    # No daemon: a process that ends early waits, rather than leave in the linker's midst.
    Thread(target=_import, args=(Path(spec.origin or "").parent / "lib",)).start()


def _import(folder: Path) -> None:
    if sys.platform == "linux":
        dlopen = ctypes.CDLL(None).dlopen
        dlopen.restype, dlopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]
        for name, scope in LIBRARIES:
            dlopen(os.fsencode(folder / name), os.RTLD_NOW | scope)
    with suppress(ImportError, OSError):
        importlib.import_module("torch")
