"""The grammar worker: compiles what strangers sent, in a process that may be killed at any time.

It speaks frames on stdin and stdout: four bytes of length, then that many bytes of JSON. The first
frame brings the tokenizer; each one after is a StructuredOutputsParams and is answered with the
reason it is refused, or null. `worker_link.py` is the other end. Starting it imports no torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from quire.errors import QuireError
from quire.grammar.matcher import GrammarCompiler
from quire.params import StructuredOutputsParams

HEADER = struct.Struct(">I")
PR_SET_PDEATHSIG = 1
ROOM_BYTES = 512 << 20  # what a grammar may take beyond the tokenizer


def pack(value: object) -> bytes:
    body = json.dumps(value).encode()
    return HEADER.pack(len(body)) + body


def main() -> int:
    _die_with(parent=int(sys.argv[1]))
    requests, replies = sys.stdin.buffer, _private_stdout()
    setup = _read(requests)
    if setup is None:
        return 0
    # Nothing is cached: the memory of one grammar must not be another's fault.
    compiler = GrammarCompiler(
        lambda: setup["tokenizer"], setup["vocab_size"], setup["eos_ids"], max_cached=0
    )
    _answer(replies, _error_of(compiler.load))
    _limit_memory()
    while (wish := _read(requests)) is not None:
        params = StructuredOutputsParams(**wish)
        _answer(replies, _error_of(partial(compiler.compile, params)))
    return 0


def _error_of(action: Callable[[], object]) -> str | None:
    try:
        action()
    except QuireError as error:
        return str(error)
    return None


def _answer(replies: BinaryIO, error: str | None) -> None:
    replies.write(pack({"error": error}))
    replies.flush()


def _read(requests: BinaryIO) -> dict[str, Any] | None:
    """The next frame; None when the other end is gone."""
    header = requests.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    body = requests.read(size)
    if len(body) < size:
        return None
    frame: dict[str, Any] = json.loads(body)
    return frame


def _private_stdout() -> BinaryIO:
    """Where frames go; whatever a library prints goes to stderr instead."""
    private = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(private, "wb")


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(0)


def _limit_memory() -> None:
    """Counted from here: libraries reserve addresses by the number of cores."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))


if __name__ == "__main__":
    sys.exit(main())
