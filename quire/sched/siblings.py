"""Siblings of n > 1, which wait in no list of the scheduler's until the parent read its prompt."""

from __future__ import annotations

from collections.abc import Iterable

from quire.request import Request, RequestId


def drop_unborn(parents: Iterable[Request], request_id: RequestId) -> bool:
    """Forget a child; whether there was one."""
    for parent in parents:
        for child in parent.children:
            if child.id == request_id:
                parent.children.remove(child)
                return True
    return False
