"""HostComm and HostLink: what ranks on GPUs say to each other, carried through memory of the host.

For ranks that share a GPU, which NCCL refuses, and from stage to stage. Everything is bytes on the
way, so a carrier need not know the dtypes of a GPU. What a rank says is copied to pinned memory, and
its stream is awaited: graphs cannot capture that, so steps run kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.dist.comm import Comm
from quire.dist.stages import Link


class HostComm:
    """`dist.comm.Comm`."""

    def __init__(self, carrier: Comm) -> None:
        """`carrier` takes tensors of the host."""
        self.carrier = carrier

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        size = x.dtype.itemsize
        every = self.carrier.gather(host_bytes(x), [width * size for width in widths])
        return _back(every, x)

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return _back(self.carrier.gather_rows(host_bytes(x), counts), x)

    def merge(self, x: Tensor) -> Tensor:
        return _back(self.carrier.merge(host_bytes(x)), x)

    def tell(self, x: Tensor) -> None:
        told = host_bytes(x)
        self.carrier.tell(told)
        x.copy_(told.view(x.dtype))

    def check(self) -> None:
        self.carrier.check()


class HostLink:
    """`dist.stages.Link`."""

    def __init__(self, link: Link) -> None:
        """`link` takes tensors of the host."""
        self.link = link

    def send(self, x: Tensor) -> None:
        self.link.send(host_bytes(x))

    def receive(self, into: Tensor) -> None:
        came = torch.empty(into.shape, dtype=into.dtype, pin_memory=into.is_cuda)
        self.link.receive(came)
        into.copy_(came)


def host_bytes(x: Tensor) -> Tensor:
    """A copy in memory of the host [..., bytes of a row], once all that x depends on is done."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    host.copy_(x)
    return host.view(torch.uint8)


def _back(every: Tensor, like: Tensor) -> Tensor:
    """Bytes of the host as a tensor like ours."""
    return every.contiguous().view(like.dtype).to(like.device)
