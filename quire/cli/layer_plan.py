"""How fast a model could decode on this machine: bytes a step must read over what memory gives.

A bound, not a promise: nothing that reads every weight once and every request's cache once can be
faster. The bandwidth of well-known GPUs is their data sheet's, that of others and of CPUs is what a
short read measures. `bench/roofline.py` counts the bytes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from quire.bench.roofline import Feed, attention_load, token_bytes
from quire.cli.weight_forms import StepWeights
from quire.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

BATCHES = (1, 32, 128)
# Words of a device's name -> bytes a second, by the makers' data sheets; the first that fits.
BANDWIDTHS = {
    "B200": 8.0e12,
    "GH200": 4.0e12,
    "H200": 4.8e12,
    "H20": 4.0e12,
    "H100 NVL": 3.9e12,
    "H100 PCIe": 2.0e12,
    "H100": 3.35e12,
    "A100-SXM4-80GB": 2.04e12,
    "A100": 1.55e12,
    "L40S": 0.864e12,
    "L40": 0.864e12,
    "L4": 0.3e12,
    "A10G": 0.6e12,
    "A10": 0.6e12,
    "RTX 5090": 1.79e12,
    "RTX 4090": 1.01e12,
    "RTX 3090": 0.936e12,
    "T4": 0.32e12,
    "V100": 0.9e12,
}
PROBE_BYTES = 1 << 27  # several times any cache
PROBE_TIMES = 3


class Bandwidth(NamedTuple):
    bytes_per_s: float
    source: str


class DecodeRate(NamedTuple):
    """The bound for a batch of requests, each with the same context behind it."""

    batch: int
    step_bytes: int
    tokens_per_s: float  # of all requests together


def bandwidth_of(device: torch.device) -> Bandwidth:
    if device.type != "cuda":
        return _measured(device, "this CPU")
    import torch

    name = torch.cuda.get_device_name(device)
    return data_sheet(name) or _measured(device, name)


def data_sheet(name: str) -> Bandwidth | None:
    """By a device's full name, as the driver tells it; None for one that is not in the table.

    >>> data_sheet("NVIDIA H100 80GB HBM3")
    Bandwidth(bytes_per_s=3350000000000.0, source='data sheet of H100')
    """
    for part, rate in BANDWIDTHS.items():
        if re.search(rf"\b{re.escape(part)}\b", name):
            return Bandwidth(rate, f"data sheet of {part}")
    return None


def _measured(device: torch.device, name: str) -> Bandwidth:
    import torch

    block = torch.ones(PROBE_BYTES // 4, device=device)
    best = float("inf")
    for _ in range(PROBE_TIMES):
        begun = time.perf_counter()
        block.sum().item()  # waits for the device
        best = min(best, time.perf_counter() - begun)
    return Bandwidth(PROBE_BYTES / best, f"{name}: a read of {PROBE_BYTES >> 20} MiB, measured")


def decode_rates(
    spec: ModelSpec,
    context: int,
    weights: StepWeights,
    entry_size: int,
    bandwidth: Bandwidth,
    batches: Sequence[int],
) -> list[DecodeRate]:
    """`entry_size`: bytes of a number in the cache."""
    rates = []
    for batch in batches:
        feeds = [Feed(context - 1, 1)] * batch
        num_bytes = weights.always + weights.experts * _visited(spec, batch)
        num_bytes += attention_load(spec, feeds, entry_size).num_bytes
        num_bytes += batch * token_bytes(spec, entry_size)  # written
        rates.append(DecodeRate(batch, round(num_bytes), batch * bandwidth.bytes_per_s / num_bytes))
    return rates


def _visited(spec: ModelSpec, tokens: int) -> float:
    """The share of experts that some token visits, if tokens choose evenly."""
    if spec.moe is None:
        return 0.0
    router = spec.moe.router
    return float(1 - (1 - router.top_k / router.num_experts) ** tokens)
