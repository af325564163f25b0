"""Packed weights on a real GPU: every bit is the dense kernel's, in a graph as well.

Inputs have a wide spread of magnitudes, so that two orders of summation do round differently. The
expanded weights are the CPU's. Most of the time goes into compiling: shapes and numbers of rows are
dealt out so that a form has each of its kernels compiled once, and all are compiled side by side
before the first test.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from benchmarks import gpu_packed
from quire.kernels.expand import embed_packed, expand
from quire.kernels.expert_columns import expert_columns
from quire.kernels.failures import FAILURES
from quire.kernels.grouped_matmul import multiply_gathered
from quire.kernels.grouped_packed import multiply_packed
from quire.kernels.matmul import interleave, matmul
from quire.kernels.packed_matmul import packed_matmul
from quire.kernels.rehearsal import rehearsal
from quire.kernels.route import SortedPairs, sort_pairs
from quire.kernels.slabs import Slabs
from quire.ops.cuda_ops import CudaOps
from quire.ops.packed_check import why_not
from quire.ops.packed_linear import EXPAND_ROWS, PackedLinear
from quire.ops.slabs_of import moved, slabs_of
from tests.native.weights import FORMS as CONTRACT
from tests.native.weights import Form, groups, powers, with_zeros

CUDA = torch.device("cuda")


def _of_benchmark(name: str) -> Form:
    return lambda num_out, num_in: gpu_packed.FORMS[name](num_out, num_in, "cpu")


# Forms whose scales lie in other words than those of the contract, and of larger groups.
WIDER = ("int4-g128", "int4-g128-asym", "int8", "fp8-blocks", "int3-g32")
FORMS: dict[str, Form] = {
    **{name: form for name, form in CONTRACT.items() if name not in ("fp32", "fp16", "bf16")},
    **{name: _of_benchmark(name) for name in WIDER},
    "4 bits, groups of 96": groups(4, 3, False),
    "8 bits, groups of 160 and zeros": groups(8, 5, True),
    "all powers": partial(powers, low=0, high=140),
    "powers up to 1": partial(powers, low=0, high=129),
}
ROWS = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128, 129, 224, 225, 256, 257)
MIDDLE = tuple(rows for rows in ROWS if 16 < rows <= 64)  # two of four heights of tiles
ENDS = tuple(rows for rows in ROWS if rows not in MIDDLE)
# Outputs that fill no tile; inputs that fill all steps, and that do not.
EVEN, ODD, ODD_WIDER = (208, 768), (176, 800), (176, 896)
GATED = ("int4-g128-asym", "fp8-blocks", "tables of four rows", "6 bits", "16 values in 8")
EXPERTS = ("int4-g128", "fp8-blocks", "table, powers", "tables of four rows", "4 bits, zeros")
NUM, EXPERT_SHAPE = 8, (256, 512)


def _spread(*shape: int) -> Tensor:
    values = torch.randn(shape, device="cuda") * torch.randn(shape, device="cuda").exp()
    return (values * shape[-1] ** -0.5).bfloat16()


@dataclass(frozen=True, slots=True)
class Case:
    slabs: Slabs
    dense: Tensor  # bf16
    x: Tensor
    bias: Tensor | None
    rows: tuple[int, ...]


@cache
def _case(
    form: str, shape: tuple[int, int], rows: tuple[int, ...], gated: bool, has_bias: bool
) -> Case:
    torch.manual_seed(len(rows))
    weight = with_zeros(FORMS[form](*shape))
    slabs = slabs_of(moved(weight, CUDA), gated)
    assert slabs is not None
    dense = weight.dequantize().bfloat16().to(CUDA)
    dense = interleave(dense).contiguous() if gated else dense
    bias = _spread(shape[0]) if has_bias else None
    return Case(slabs, dense, _spread(max(rows), shape[1]), bias, rows)


def _cases(form: str) -> tuple[Case, Case]:
    """Every number of rows with one of two shapes, in turns from form to form."""
    odd = ODD_WIDER if form in WIDER else ODD
    turns = (MIDDLE, ENDS) if list(FORMS).index(form) % 2 else (ENDS, MIDDLE)
    return _case(form, EVEN, turns[0], False, False), _case(form, odd, turns[1], False, True)


def _multiply(case: Case) -> None:
    expand(case.slabs, torch.empty_like(case.dense))
    for rows in case.rows:
        packed_matmul(case.x[:rows], case.slabs, case.bias)
        matmul(case.x[:rows], case.dense, case.bias)


def _multiply_gated(form: str) -> Case:
    case = _case(form, EVEN, (1, 257), True, False)
    for rows in case.rows:
        packed_matmul(case.x[:rows], case.slabs, gate="silu")
        matmul(case.x[:rows], case.dense, gate="silu")
    return case


@cache
def _routed(tokens: int) -> tuple[Tensor, SortedPairs]:
    torch.manual_seed(tokens)
    experts = torch.randint(0, NUM, (tokens, 2), device="cuda", dtype=torch.int32)
    return _spread(tokens, EXPERT_SHAPE[1]), sort_pairs(experts, NUM, None)


def _multiply_experts(form: str) -> list[tuple[Tensor, Tensor]]:
    case = _case(form, (NUM * EXPERT_SHAPE[0], EXPERT_SHAPE[1]), (1,), False, False)
    found = []
    for tokens in (1, 300):
        x, pairs = _routed(tokens)
        want = multiply_gathered(x, case.dense.view(NUM, *EXPERT_SHAPE), pairs)
        found.append((multiply_packed(x, case.slabs, pairs, None, is_gather=True), want))
    return found


WORK: dict[str, Callable[[str], object]] = {
    "test_bits_are_the_dense_kernels": lambda form: [_multiply(case) for case in _cases(form)],
    "test_gated": _multiply_gated,
    "test_experts": _multiply_experts,
}


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """What does not compile fails again in its own test."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen = [
        partial(WORK[item.originalname], item.callspec.params["form"])
        for item in items
        if item.path == request.path and item.originalname in WORK
    ]
    for tokens in (1, 300):
        _routed(tokens)  # not in a rehearsal: rows are looked up by what it finds
    with suppress(*FAILURES), rehearsal():
        for work in chosen:
            with suppress(*FAILURES):
                work()


@pytest.mark.parametrize("form", FORMS)
def test_bits_are_the_dense_kernels(form: str) -> None:
    for case in _cases(form):
        assert torch.equal(expand(case.slabs, torch.empty_like(case.dense)), case.dense)
        for rows in case.rows:
            want = matmul(case.x[:rows], case.dense, case.bias)
            got = packed_matmul(case.x[:rows], case.slabs, case.bias)
            assert torch.equal(got, want), (case.slabs.shape, rows)


@pytest.mark.parametrize("form", GATED)
def test_gated(form: str) -> None:
    case = _multiply_gated(form)
    for rows in case.rows:
        want = matmul(case.x[:rows], case.dense, gate="silu")
        assert torch.equal(packed_matmul(case.x[:rows], case.slabs, gate="silu"), want), rows


@pytest.mark.parametrize("form", EXPERTS)
def test_experts(form: str) -> None:
    for got, want in _multiply_experts(form):
        assert torch.equal(got, want), len(got)


def test_columns_of_experts() -> None:
    """Red when an expert's inputs come in another one's order."""
    x, pairs = _routed(300)
    num_in = EXPERT_SHAPE[1]
    orders = torch.stack([torch.randperm(num_in, device="cuda") for _ in range(NUM)]).int()
    expert = torch.arange(NUM, device="cuda").repeat_interleave(pairs.counts.long())
    own = orders[expert].long()  # [pairs, k], sorted by expert
    got = expert_columns(x, orders, pairs, is_gather=True)[pairs.pairs.long()]
    assert torch.equal(got, x[pairs.pairs.long() // pairs.top_k].gather(1, own))
    rows = _spread(600, num_in)
    assert torch.equal(expert_columns(rows, orders, pairs, is_gather=False), rows.gather(1, own))


@pytest.mark.parametrize(
    "form, gate, dtype",
    [("int4-g128-asym", None, torch.bfloat16), ("6 bits", "silu", torch.float16)],
)
def test_the_check_passes(form: str, gate: str | None, dtype: torch.dtype) -> None:
    """Red when the engine would expand the form here."""
    torch.manual_seed(0)
    assert why_not(moved(FORMS[form](512, 768), CUDA), gate, dtype) is None


def test_a_graph_replays_what_ran() -> None:
    """Red when scratch moves, or a kernel reads it before it is written."""
    torch.manual_seed(4)
    ops = CudaOps(CUDA, torch.bfloat16)
    form = gpu_packed.FORMS["int4-g128"]
    kernels = [ops.linear([form(1024, 1024, "cuda")], None) for _ in range(4)]
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
    weight = gpu_packed.FORMS["int8"](1000, 512, "cuda")
    slabs = slabs_of(weight)
    assert slabs is not None
    ids = torch.randint(0, 1000, (77,), device="cuda")
    want = weight.dequantize().bfloat16()[ids]
    assert torch.equal(embed_packed(slabs, ids, torch.bfloat16), want)
