"""Devices: what a datasheet says of each, by which a table of one is scaled to another.

Rates are dense bf16 with sums in fp32. What of them programs reach was measured on one device
alone, the H200, and is assumed of all others; so is the time that a layer's launches take.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.bench.peers import H200 as H200_MEASURED
from quire.bench.roofline import Ceilings
from quire.errors import BadRequest

GIB = 1 << 30
# Seconds of a layer in a decode step of one request that no byte explains: Qwen3-0.6B on the H200
# takes 0.692 ms where its bytes take 0.288, in 28 layers.
LAYER_S = 14e-6
# Of products in prompts; attention computes at 500 TFLOP/s where products reach 700.
ATTENTION_SHARE = 500 / 700


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    memory: int  # bytes
    bandwidth: float  # bytes a second
    flops: float
    link: float  # bytes a second to the other devices of its machine, one way
    link_s: float  # until an exchange with them has begun; assumed
    source: str

    @property
    def ceilings(self) -> Ceilings:
        """What programs reach of it, as far as is known."""
        return Ceilings(self.bandwidth * REACHED_BYTES, self.flops * REACHED_FLOPS, self.source)


NVLINK_S, PCIE_S = 8e-6, 20e-6
H200 = Device(
    *("h200", 139 * GIB, 4.8e12, 989e12, 450e9, NVLINK_S),
    "datasheet of the H200 SXM; 4.24 TB/s and 700 TFLOP/s of it measured",
)
REACHED_BYTES = H200_MEASURED.bandwidth / H200.bandwidth
REACHED_FLOPS = H200_MEASURED.flops / H200.flops

DEVICES = {
    device.name: device
    for device in (
        H200,
        Device(
            *("h100", 79 * GIB, 3.35e12, 989e12, 450e9, NVLINK_S),
            "datasheet of the H100 SXM",
        ),
        Device(
            *("a100", 79 * GIB, 2.039e12, 312e12, 300e9, NVLINK_S),
            "datasheet of the A100 SXM 80 GB",
        ),
        Device(
            *("l40s", 44 * GIB, 0.864e12, 362e12, 32e9, PCIE_S),
            "datasheet of the L40S; linked by PCIe 4.0 x16",
        ),
        Device(
            *("rtx4090", 23 * GIB, 1.008e12, 165.2e12, 32e9, PCIE_S),
            "datasheet of the GeForce RTX 4090; linked by PCIe 4.0 x16",
        ),
    )
}


def device_named(name: str) -> Device:
    if name not in DEVICES:
        raise BadRequest(f"got device {name!r}, known: {', '.join(DEVICES)}")
    return DEVICES[name]
