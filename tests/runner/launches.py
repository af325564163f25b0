"""Which of torch's operations would launch something on a device: all but views and allocations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """
    >>> import torch
    >>> with Launches() as launches, torch.inference_mode():
    ...     _ = torch.empty(4)[1:].int().int()
    >>> launches.names
    ['to']
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        out = func(*args, **(kwargs or {}))
        is_view = func.is_view
        if is_view and isinstance(out, Tensor):  # `to` and `contiguous` only may be one
            is_view = _place(out) == _place(args[0])
        if not is_view and "empty" not in name:
            self.names.append(name)
        return out


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def counted(launches: Launches) -> list[str]:
    """The names so far, and begin again."""
    names, launches.names = launches.names, []
    return names
