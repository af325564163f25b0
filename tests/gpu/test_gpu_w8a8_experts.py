"""Experts of eight bits by eight on a real GPU: the bits of dense products, in any company.

The tiled dense kernel on 16 rows says what the bits are, expert by expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from benchmarks.gpu_experts import FORMS, bytes_of
from quire import LLM, SamplingParams
from quire.kernels.eight_bit_matmul import EightBitTile, eight_bit_matmul
from quire.kernels.grouped_eight_bit import TILES, multiply_eight_bit
from quire.kernels.rehearsal import rehearsal
from quire.kernels.round_inputs import RoundedRows, round_inputs
from quire.kernels.route import sort_pairs
from quire.models.tiny import tiny_model
from quire.nn.ops import GateForm, Visits
from quire.ops.cuda_ops import gate
from quire.ops.eight_bit_experts import EightBitExperts, grouped_difference
from quire.ops.eight_bit_of import eight_bit_form
from quire.quant.weight import Weight

CUDA = torch.device("cuda")
ONE_TILE = EightBitTile(16, 64, 3, 4, 64)
# Experts, top_k, inputs, outputs: Qwen3's proportions, wide ones, and sizes that fill no tile.
SIZES = {"many": (64, 8, 1024, 768), "wide": (8, 2, 2048, 1536), "odd": (6, 3, 272, 176)}


def _spread(m: int, k: int) -> Tensor:
    values = torch.randn(m, k, device=CUDA) * torch.randn(m, k, device=CUDA).exp()
    return values.bfloat16()


def _routing(kind: str, tokens: int, num: int, top_k: int) -> Tensor:
    if kind == "one expert":
        return torch.full((tokens, top_k), num // 2, dtype=torch.int32, device=CUDA)
    scores = torch.rand(tokens, num, device=CUDA)
    return scores.topk(top_k).indices.int()


def _rows(x: RoundedRows, rows: Tensor) -> RoundedRows:
    return RoundedRows(x.codes.view(torch.uint8)[rows].view(x.codes.dtype), x.scales[rows])


def _by_dense(x: RoundedRows, weight: Weight, experts: Tensor, num: int, act: str | None) -> Tensor:
    """[pairs, n], pair by pair: rows of x are those of tokens."""
    top_k, chosen, made = experts.shape[1], experts.flatten(), None
    n = weight.shape[0] // num
    for expert in chosen.unique().tolist():
        dense = bytes_of(weight.pick(torch.arange(expert * n, (expert + 1) * n, device=CUDA)), 1,
                         act is not None).weight  # fmt: skip
        own = (chosen == expert).nonzero().squeeze(1)
        got = eight_bit_matmul(_rows(x, own // top_k), dense, None, torch.bfloat16, ONE_TILE, act)
        made = got.new_empty(len(chosen), got.shape[1]) if made is None else made
        made[own] = got
    assert made is not None
    return made


@pytest.mark.parametrize("kind", ["spread", "one expert"])
@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_bits_are_the_dense_products(form: str, size: str, act: str | None, kind: str) -> None:
    """Red when a tile, a routing or a neighbour shows in a bit."""
    torch.manual_seed(1)
    num, top_k, k, n = SIZES[size]
    weight = FORMS[form](num * n, k, "cuda")
    if eight_bit_form(weight) is None:
        pytest.skip("blocks of 128 inputs cut this width off")
    part = bytes_of(weight, num, act is not None)
    for tokens in (1, 7, 130, 700):
        experts = _routing(kind, tokens, num, top_k)
        rounded, pairs = round_inputs(_spread(tokens, k), part.rounding), sort_pairs(experts, num)
        want = _by_dense(rounded, weight, experts, num, act)[pairs.pairs.long()]
        arguments = (rounded, part.weight, pairs, None, torch.bfloat16)
        with rehearsal():
            for tile in TILES:
                multiply_eight_bit(*arguments, is_gather=True, gate=act, tile=tile)
        for tile in (None, *TILES):
            got = multiply_eight_bit(*arguments, is_gather=True, gate=act, tile=tile)
            assert torch.equal(got, want), (tokens, tile, int((got != want).sum()))


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_is_near_fp64_and_sees_no_neighbour(form: str) -> None:
    torch.manual_seed(2)
    num, top_k, hidden, ffn = 16, 4, 512, 384
    up, down = FORMS[form](num * 2 * ffn, hidden, "cuda"), FORMS[form](num * hidden, ffn, "cuda")
    layer = EightBitExperts(
        bytes_of(up, num, True), bytes_of(down, num, False), num, GateForm(), gate
    )
    x, experts = _spread(300, hidden) * 0.02, _routing("spread", 300, num, top_k)
    shares = torch.rand(300, top_k, device=CUDA)
    whole = layer(x, Visits(experts, shares), None)
    want = torch.zeros(300, hidden, dtype=torch.double, device=CUDA)
    first = up.dequantize().double().view(num, 2 * ffn, hidden)
    second = down.dequantize().double().view(num, hidden, ffn)
    for expert in range(num):
        token, rank = torch.where(experts == expert)
        a, b = (x[token].double() @ first[expert].T).chunk(2, -1)
        y = (torch.nn.functional.silu(a) * b) @ second[expert].T
        want.index_add_(0, token, y * shares[token, rank, None].double())
    assert (whole.double() - want).norm() / want.norm() < 0.06  # inputs have three or seven bits
    for count in (1, 5, 33, 200):
        picked = torch.randperm(300, device=CUDA)[:count]
        some = Visits(experts[picked].contiguous(), shares[picked].contiguous())
        assert torch.equal(layer(x[picked].contiguous(), some, None), whole[picked]), count


@pytest.mark.parametrize("form", FORMS)
def test_the_check_at_load_passes(form: str) -> None:
    """Red when this device's compiler gives other bits, and experts would keep their inputs."""
    weight = FORMS[form](2 * 256, 1024, "cuda")
    found = eight_bit_form(weight)
    assert found is not None
    assert grouped_difference(weight, found, torch.bfloat16) is None


# ------------------------------------------------------------ the engine

PROMPTS = [[7 * i % 97 + 3 for i in range(length)] for length in (1, 5, 40, 200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "vocab_size": 512}
    made = Path(tmp_path_factory.mktemp("moe"))
    return str(tiny_model("qwen3_moe", made, tokenizer=False, torch_dtype="bfloat16", **sizes))


@pytest.fixture(scope="module", params=["fp8", "int8"])
def llm(request: pytest.FixtureRequest, folder: str) -> Iterator[LLM]:
    yield _llm(folder, quantization=request.param)


def _llm(folder: str, **options: object) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, kv_cache_memory=64 << 20, **options)


def _tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = llm.generate(prompts, params, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in found]


def test_a_request_alone_gets_the_tokens_of_a_batch(llm: LLM) -> None:
    """Red when graphs or neighbours change a bit, or experts keep their inputs."""
    kernels = [b.mlp.experts.kernel for b in llm._engine.runner.model.blocks]
    assert all(isinstance(kernel, EightBitExperts) for kernel in kernels), kernels
    together = _tokens(llm, PROMPTS)
    assert [_tokens(llm, [prompt])[0] for prompt in PROMPTS] == together
