"""Figures of others on the same workloads, and what the device can do. Data only.

Units are those of the rows in `suite.py`: milliseconds, output tokens a second or seconds. A row
without an entry has no such figure.
"""

from __future__ import annotations

from quire.bench.roofline import Ceilings

VLLM_NAME = "vLLM 0.26"
VLLM_SOURCE = (
    "vLLM 0.26.0 with its defaults (CUDA graphs, FlashAttention-3, async scheduling), measured"
    " November 2026 on one NVIDIA H200 141 GB, driver 580, CUDA 13.0, torch 2.11, bf16 dummy"
    " weights, the same workloads; nano: the better of two runs, mixed and prefix: one figure, runs"
    " not recorded"
)
VLLM = {
    "start-8b-first": 70.0,
    "start-8b-again": 55.0,
    "decode-8b-1": 4.92,
    "decode-8b-8": 5.01,
    "decode-8b-32": 5.45,
    "decode-8b-128": 7.23,
    "decode-8b-256": 11.0,
    "prefill-8b-512": 15.1,
    "prefill-8b-2048": 52.1,
    "prefill-8b-8192": 214.0,
    "long-8b-32k": 12.56,
    "long-8b-128k": 8.69,
    "mixed-8b": 11857.0,
    "prefix-8b": 10138.0,
    "decode-0.6b-1": 2.01,
    "decode-0.6b-32": 2.67,
    "decode-0.6b-256": 7.07,
    "nano-0.6b": 22059.0,
    "decode-14b-1": 8.42,
    "decode-14b-64": 9.76,
    "nano-14b": 6319.0,
    "decode-8b-fp8-1": 3.46,
    "decode-8b-fp8-32": 4.51,
    "decode-8b-fp8-256": 8.99,
    "prefill-8b-fp8-2048": 33.9,
    "prefill-8b-fp8-8192": 143.0,
}

# What we want to reach, by row.
TARGETS = {
    "start-8b-first": 15.0,
    "start-8b-again": 8.0,
    "decode-8b-1": 4.0,
    "decode-8b-8": 4.2,
    "decode-8b-32": 4.6,
    "decode-8b-128": 6.3,
    "decode-8b-256": 9.5,
    "prefill-8b-512": 13.5,
    "prefill-8b-2048": 50.0,
    "prefill-8b-8192": 208.0,
    "long-8b-32k": 12.1,
    "long-8b-128k": 8.1,
    "mixed-8b": 13000.0,
    "prefix-8b": 12500.0,
    "decode-0.6b-1": 1.0,
    "decode-0.6b-32": 1.6,
    "decode-0.6b-256": 4.5,
    "nano-0.6b": 29000.0,
    "decode-14b-1": 7.4,
    "decode-14b-64": 8.6,
    "nano-14b": 6900.0,
}

H200 = Ceilings(
    bandwidth=4.24e12,
    flops=700e12,
    source="H200 as measured: reduction over 8 GB; cuBLAS bf16 GEMM of 2048-8192 rows",
)
