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
from quire.kernels.route import sort_pairs
from quire.ops.cuda_ops import CudaOps
from quire.ops.packed_check import why_not
from quire.ops.packed_linear import EXPAND_ROWS, PackedLinear
from quire.ops.slabs_of import slabs_of

ROWS = (1, 2, 3, 16, 17, 32, 33, 64, 65, 100, 128, 129, 200, 256, 257)
SHAPES = ((512, 1024), (1000, 1536), (4096, 4096))


def _spread(*shape: int) -> Tensor:
    values = torch.randn(shape, device="cuda") * torch.randn(shape, device="cuda").exp()
    return (values * shape[-1] ** -0.5).bfloat16()


@pytest.mark.parametrize("form", FORMS)
def test_the_check_passes(form: str) -> None:
    """Red when the engine would expand the form here."""
    torch.manual_seed(0)
    weight = FORMS[form](512, 1024, "cuda")
    assert why_not(weight, None, torch.bfloat16) is None
    assert why_not(weight, "silu", torch.bfloat16) is None
    assert why_not(weight, None, torch.float16) is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n,k", SHAPES)
def test_bits_are_the_dense_kernels(form: str, n: int, k: int) -> None:
    torch.manual_seed(n)
    weight = FORMS[form](n, k, "cuda")
    slabs, dense = slabs_of(weight), weight.dequantize().bfloat16()
    assert slabs is not None
    assert torch.equal(expand(slabs, torch.empty_like(dense)), dense)
    x, bias = _spread(ROWS[-1], k), _spread(n)
    for rows in ROWS:
        want = matmul(x[:rows], dense, bias)
        assert torch.equal(packed_matmul(x[:rows], slabs, bias), want), rows


@pytest.mark.parametrize("form", FORMS)
def test_gated(form: str) -> None:
    torch.manual_seed(2)
    weight = FORMS[form](1024, 1024, "cuda")
    slabs, x = slabs_of(weight, paired=True), _spread(257, 1024)
    assert slabs is not None
    dense = interleave(weight.dequantize().bfloat16())
    for rows in (1, 17, 64, 257):
        want = matmul(x[:rows], dense, gate="silu")
        assert torch.equal(packed_matmul(x[:rows], slabs, gate="silu"), want), rows


@pytest.mark.parametrize("form", ["int4-g128", "fp8-blocks", "mxfp4"])
def test_experts(form: str) -> None:
    torch.manual_seed(3)
    num, n, k = 8, 256, 512
    weight = FORMS[form](num * n, k, "cuda")
    slabs, dense = slabs_of(weight), weight.dequantize().bfloat16().view(num, n, k)
    assert slabs is not None
    for tokens in (1, 7, 64, 300):
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
    for rows in (1, 64, EXPAND_ROWS, 600):
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
