"""Quire's reference mode, `--dtype float32`: weights are expanded."""

from __future__ import annotations

from quire.bench.cpu.quire_packed import QuirePeer
from quire.bench.cpu.work import Setup


def open_peer(setup: Setup) -> QuirePeer:
    return QuirePeer(setup, "float32")
