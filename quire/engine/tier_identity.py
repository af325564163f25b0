"""What decides the bytes of a page besides its tokens, as one digest: the fingerprint of a folder.

All bytes of the model's files; its config; the forms of weights and cache and how a page is laid
out; torch, the kind of machine or GPU and what compiles its kernels; and our own sources from the
file to the kernels, so that no version number can be forgotten. The instruction set and the number
of threads of a CPU are not in it: they do not change bits. Digests of files that did not change are
remembered, since a large model takes a while to read.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

from quire.attn.backend import AttentionBackend
from quire.config import EngineArgs, EngineConfig
from quire.dist.ranks import ALONE, Ranks
from quire.engine.pack_identity import SETTLED_S
from quire.kv.spec import CacheSpec
from quire.load.checkpoint import Checkpoint
from quire.load.wish import Wish
from quire.models.spec import ModelSpec
from quire.nn.ops import Ops

PACKAGE = Path(__file__).parent.parent
_MODEL = ("dist", "load", "lora", "memory", "models", "nn", "quant")
SOURCES = ("attn", "engine", "kernels", "native", "ops", *_MODEL)  # engine: what is evened out
BY_LENGTH = ("dynamic", "longrope")  # rotations that depend on the longest context


class PageMakers(NamedTuple):
    """Everything that has a say in a page's bytes."""

    checkpoint: Checkpoint
    spec: ModelSpec
    config: EngineConfig
    wish: Wish
    ops: Ops
    backend: AttentionBackend
    cache: CacheSpec
    ranks: Ranks = ALONE  # whose share of each page it is


def fingerprint(made: PageMakers, args: EngineArgs, memo: Path) -> bytes:
    """32 bytes; `memo` is the file that remembers digests of the model's files."""
    rope, longest = made.spec.rope, ""
    if rope is not None and rope.kind in BY_LENGTH:
        longest = str(made.config.sched.max_model_len)
    parts = [
        _weights(made, memo),
        json.dumps(made.checkpoint.config, default=repr, sort_keys=True),
        *(repr(made.wish), made.config.dtype, longest, str(args.quantization)),
        *(type(made.ops).__name__, type(made.backend).__name__, str(made.backend.cache_dtype)),
        *(_layout(made.cache), _place(made.ranks)),
        *(torch.__version__, machine(made.config.device), _sources()),
    ]
    return hashlib.sha256("\0".join(parts).encode()).digest()


def machine(device: str) -> str:
    """What computes: pages of a CPU and of a GPU, or of two kinds of GPU, differ in bits."""
    if device == "cpu":
        return platform.machine()
    kind = (torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    return repr((device, *kind, torch.version.cuda, version("triton")))


def _layout(cache: CacheSpec) -> str:
    scales = sorted((layer, *pair) for layer, pair in cache.scales.items())
    known = (cache.shape, cache.groups, cache.page_size, cache.plain, cache.coded)
    return repr((*known, sorted(cache.skipped), scales))


def _place(ranks: Ranks) -> str:
    """Among how many, cut how, and which of them."""
    beside, behind = (ranks.rank, ranks.size), (ranks.stage.index, ranks.stage.count)
    return repr((*beside, *behind, ranks.splits_sums))


def group_mark(marks: Sequence[bytes]) -> bytes:
    """Of all ranks' fingerprints, by process: every share follows from what all of them have."""
    return hashlib.sha256(b"".join(marks)).digest()


def share_mark(group: bytes, own: bytes) -> bytes:
    """Of one rank's share: no other rank's folder can stand in for it."""
    return hashlib.sha256(group + own).digest()


def _weights(made: PageMakers, memo: Path) -> str:
    if made.config.load_format == "dummy":
        return f"random {made.config.seed}"
    if made.checkpoint.files:
        return _files_digest(made.checkpoint.files, memo)
    digest = hashlib.sha256()
    for name in sorted(made.checkpoint.names()):
        tensor = made.checkpoint.read(name).contiguous()
        digest.update(name.encode() + tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _files_digest(paths: Sequence[Path], memo: Path) -> str:
    known, digests = _remembered(memo), list[str]()
    kept: dict[str, str] = {}
    for path in paths:
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            times = (facts.st_mtime_ns, facts.st_ctime_ns)
            name = repr((str(path.resolve()), facts.st_ino, facts.st_size, *times))
            digests.append(known.get(name) or hashlib.file_digest(file, "sha256").hexdigest())
        # Two changes this close may leave the same times behind.
        if max(facts.st_mtime, facts.st_ctime) < time.time() - SETTLED_S:
            kept[name] = digests[-1]
    memo.touch(mode=0o600)
    memo.write_text(json.dumps(kept), encoding="utf-8")
    return "\n".join(digests)


def _remembered(memo: Path) -> dict[str, str]:
    """Nothing, if the file is not what we wrote."""
    try:
        read = json.loads(memo.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(read, dict):
        return {}
    return {str(name): str(digest) for name, digest in read.items()}


def _sources() -> str:
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((PACKAGE / folder).rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
