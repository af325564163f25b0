"""Siblings of n > 1 that wait, in no list of the scheduler's, until their parent's prompt is read."""

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
