"""Packed weights on a real GPU: every bit is the dense kernel's, in a graph as well.

Inputs have a wide spread of magnitudes, so that two orders of summation do round differently.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from benchmarks.gpu_packed import FORMS
from quire.kernels.expand import embed_packed, expand
from quire.kernels.grouped_matmul import multiply_gathered
from quire.kernels.grouped_packed import multiply_packed
from quire.kernels.matmul import interleave, matmul
from quire.kernels.packed_matmul import packed_matmul
from quire.kernels.rehearsal import rehearsal
from quire.kernels.route import sort_pairs
from quire.ops.cuda_ops import CudaOps
from quire.ops.packed_check import why_not
from quire.ops.packed_linear import EXPAND_ROWS, PackedLinear
from quire.ops.slabs_of import slabs_of

ROWS = (1, 17, 33, 129, 257)  # one for each tile, and the expanded weight
# Outputs that fill no tile and inputs that fill no step are another kernel: few rows of it will do.
SHAPES = (((512, 1024), ROWS), ((1000, 1536), (2, 100)))


def _spread(*shape: int) -> Tensor:
    values = torch.randn(shape, device="cuda") * torch.randn(shape, device="cuda").exp()
    return (values * shape[-1] ** -0.5).bfloat16()


@pytest.mark.parametrize("form", ["int4-g128-asym", "fp8", "Q6_K", "codebook"])
def test_the_check_passes(form: str) -> None:
    """Red when the engine would expand the form here."""
    torch.manual_seed(0)
    weight = FORMS[form](512, 1024, "cuda")
    assert why_not(weight, None, torch.bfloat16) is None
    assert why_not(weight, "silu", torch.float16) is None


@pytest.mark.parametrize("form", FORMS)
def test_bits_are_the_dense_kernels(form: str) -> None:
    for (n, k), sizes in SHAPES:
        torch.manual_seed(n)
        weight, x, bias = FORMS[form](n, k, "cuda"), _spread(sizes[-1], k), _spread(n)
        slabs, dense = slabs_of(weight), weight.dequantize().bfloat16()
        assert slabs is not None
        with rehearsal():  # kernels are compiled side by side
            expand(slabs, torch.empty_like(dense))
            for rows in sizes:
                packed_matmul(x[:rows], slabs, bias)
                matmul(x[:rows], dense, bias)
        assert torch.equal(expand(slabs, torch.empty_like(dense)), dense)
        for rows in sizes:
            want = matmul(x[:rows], dense, bias)
            assert torch.equal(packed_matmul(x[:rows], slabs, bias), want), rows


@pytest.mark.parametrize("form", FORMS)
def test_gated(form: str) -> None:
    torch.manual_seed(2)
    weight = FORMS[form](1024, 1024, "cuda")
    slabs, x = slabs_of(weight, paired=True), _spread(257, 1024)
    assert slabs is not None
    dense = interleave(weight.dequantize().bfloat16())
    with rehearsal():
        for rows in (1, 257):
            packed_matmul(x[:rows], slabs, gate="silu")
            matmul(x[:rows], dense, gate="silu")
    for rows in (1, 257):
        want = matmul(x[:rows], dense, gate="silu")
        assert torch.equal(packed_matmul(x[:rows], slabs, gate="silu"), want), rows


@pytest.mark.parametrize("form", ["int4-g128", "fp8-blocks", "mxfp4"])
def test_experts(form: str) -> None:
    torch.manual_seed(3)
    num, n, k = 8, 256, 512
    weight = FORMS[form](num * n, k, "cuda")
    slabs, dense = slabs_of(weight), weight.dequantize().bfloat16().view(num, n, k)
    assert slabs is not None
    for tokens in (1, 300):
        experts = torch.randint(0, num, (tokens, 2), device="cuda", dtype=torch.int32)
        pairs, x = sort_pairs(experts, num, None), _spread(tokens, k)
        want = multiply_gathered(x, dense, pairs)
        assert torch.equal(multiply_packed(x, slabs, pairs, None, is_gather=True), want), tokens


def test_a_graph_replays_what_ran() -> None:
    """Red when scratch moves, or a kernel reads it before it is written."""
    torch.manual_seed(4)
    ops = CudaOps(torch.device("cuda"), torch.bfloat16)
    kernels = [ops.linear([FORMS["int4-g128"](1024, 1024, "cuda")], None) for _ in range(4)]
    assert all(isinstance(kernel, PackedLinear) for kernel in kernels)
    for rows in (1, EXPAND_ROWS):
        x = _spread(rows, 1024)

        def chain(x: Tensor = x) -> Tensor:
            for kernel in kernels:
                x = kernel(x)
            return x

        want = chain().clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain()
        for _ in range(3):
            graph.replay()
            assert torch.equal(got, want), rows


def test_embeddings() -> None:
    weight = FORMS["int8"](1000, 512, "cuda")
    slabs = slabs_of(weight)
    assert slabs is not None
    ids = torch.randint(0, 1000, (77,), device="cuda")
    want = weight.dequantize().bfloat16()[ids]
    assert torch.equal(embed_packed(slabs, ids, torch.bfloat16), want)
