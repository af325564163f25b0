"""Urge: a flag that any thread raises, and that a step on a tape looks at between two operations.

A step that nobody waits for is given up when somebody comes: what it computed is thrown away and
computed again later, with the same bits. See `sched/background.py` for who gives way.
"""

from __future__ import annotations

import ctypes


class GivenUp(Exception):
    """The step ended in the middle; nothing of it counts."""


class Urge:
    def __init__(self) -> None:
        self._flag = ctypes.c_int32(0)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._flag)

    def set(self) -> None:
        self._flag.value = 1

    def clear(self) -> None:
        self._flag.value = 0
