"""What decides the bytes of a model's pack, as one digest.

The model's files by path, size and times, with blocks of them read; its config; the form asked for;
torch and the machine, since rounding is torch's; and our own sources from the file to the panels,
so that no version number can be forgotten. Times are those of the last change of anything about a
file, which nobody can set.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from quire import env
from quire.dist.ranks import ALONE, Ranks
from quire.engine.collector import return_heap
from quire.load.checkpoint import Checkpoint
from quire.load.wish import Wish
from quire.native.pack_file import sample_digest
from quire.native.packs import Packs, Shelf

PACKAGE = Path(__file__).parent.parent
SOURCES = (
    "dist",
    "load",
    "models",
    "native",
    "nn",
    "ops",
    "quant",
)  # folders with a say in the bytes
# Two changes this close may leave the same time behind.
SETTLED_S = 2.0


def packs_of(checkpoint: Checkpoint, wish: Wish, ranks: Ranks = ALONE) -> Packs | None:
    """None: weights are floats of the model's dtype, or come from no file."""
    if not wish.is_packed or not checkpoint.files:
        return None
    first = checkpoint.files[0]
    name = re.sub(r"[^\w.-]", "_", f"{first.parent.name}-{first.stem}")[:80]
    shelf = Shelf(env.cache_folder() / "packs", env.pack_limit())
    return Packs(shelf, name, partial(identity_of, checkpoint, wish, ranks))


def keep(packs: Packs | None) -> None:
    """Weights are in their kernels: write the pack, if there is to be one, and give back what
    loading took."""
    if packs is not None:
        packs.save()
        return_heap()


def identity_of(checkpoint: Checkpoint, wish: Wish, ranks: Ranks = ALONE) -> str | None:
    """None: a file changed just now, and what was read of it may be older than its times."""
    files, config = _files(checkpoint.files), json.dumps(checkpoint.config, default=repr)
    if files is None:
        return None
    stage = ranks.stage
    share = f"{ranks.rank} of {ranks.size}, stage {stage.index} of {stage.count}"
    share += f", splits sums: {ranks.splits_sums}"
    share += ", whole attention" * ranks.has_homes
    parts = (files, config, repr(wish), share, torch.__version__, platform.machine(), _sources())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _files(paths: Sequence[Path]) -> str | None:
    seen = []
    try:
        for path in paths:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                if max(found.st_mtime, found.st_ctime) > time.time() - SETTLED_S:
                    return None
                facts = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
                samples = sample_digest(file.fileno(), 0, found.st_size)
                seen.append(repr((str(path.resolve()), facts, samples)))
    except OSError:
        return None
    return "\n".join(seen)


def _sources() -> str:
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((PACKAGE / folder).glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
