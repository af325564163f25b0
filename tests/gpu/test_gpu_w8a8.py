"""Eight bits by eight on a real GPU: one row's bits are the same in every kernel and batch.

The tiled kernel on 16 rows says what the bits are; it is near fp64, and all others equal it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.bench.shapes import SHAPES, shrunk, write_shape
from quire.kernels.eight_bit_matmul import EightBitTile, eight_bit_matmul
from quire.kernels.eight_bit_weight import EightBitWeight
from quire.kernels.hopper import has_hopper_kernels
from quire.kernels.rehearsal import rehearsal
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rms_norm_round import rms_norm_round
from quire.kernels.round_inputs import RoundedRows, Rounding, round_inputs
from quire.kernels.silu_mul import silu_mul
from quire.kernels.silu_mul_round import silu_mul_round
from quire.kernels.vendor_eight_bit import VendorEightBit
from quire.models.tiny import tiny_model
from quire.ops.cuda_ops import CudaOps
from quire.ops.eight_bit_joints import EightBitPair, NormedProduct
from quire.ops.eight_bit_linear import EightBitLinear

CUDA = torch.device("cuda")
E4M3 = torch.float8_e4m3fn
ROUNDINGS = {
    "int8": Rounding(torch.int8),
    "fp8": Rounding(E4M3),
    "fp8-one": Rounding(E4M3, scale=0.01),
    "fp8-blocks": Rounding(E4M3, 128),
}
ONE_TILE = EightBitTile(16, 64, 3, 4, 64)
ROWS = (1, 2, 7, 8, 9, 16, 17, 31, 33, 64, 65, 100, 128, 129, 200, 300)
needs_hopper = pytest.mark.skipif(not has_hopper_kernels(CUDA), reason="needs a Hopper GPU")


def _weight(name: str, n: int, k: int, paired: bool = False) -> EightBitWeight:
    group = ROUNDINGS[name].group or 0
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=CUDA)
    if name != "int8":
        codes = (torch.randn(n, k, device=CUDA) * 60).clamp(-448, 448).to(E4M3)
    rows = 48 if group else 1  # that share a scale: borders lie within tiles
    scales = torch.rand(k // group if group else 1, -(-n // rows), device=CUDA) * 0.001
    return EightBitWeight(codes, scales, group, paired, rows)


def _spread(m: int, k: int) -> Tensor:
    values = torch.randn(m, k, device=CUDA) * torch.randn(m, k, device=CUDA).exp()
    return values.bfloat16()


def _exact(x: RoundedRows, w: EightBitWeight) -> Tensor:
    """[m, n] fp64."""
    k = w.shape[1]
    wide = x.scales.repeat_interleave(w.group or k, 1)[:, :k].double()
    scales = w.row_scales.repeat_interleave(w.group or k, 0)[:k].double()
    return (x.codes.double() * wide) @ (w.codes.double() * scales.T).T


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize(
    "n,k,gate,biased",
    [
        (1024, 1024, None, True),
        (520, 1152, None, False),
        (16384, 512, None, False),
        (16384, 512, "silu", True),
    ],
)
def test_bits_do_not_depend_on_the_batch(
    name: str, n: int, k: int, gate: str | None, biased: bool
) -> None:
    """Red when a tile, the streamed kernel or the library sums or scales in another order."""
    torch.manual_seed(n + k)
    w = _weight(name, n, k, gate is not None)
    bias = torch.randn(n, device=CUDA).bfloat16() if biased else None
    kernel, x = EightBitLinear(w, ROUNDINGS[name], bias, gate), _spread(ROWS[-1], k)
    with rehearsal():
        for rows in ROWS:
            kernel(x[:rows])
    rounded = round_inputs(x, ROUNDINGS[name])
    want = eight_bit_matmul(rounded, w, kernel.bias, x.dtype, ONE_TILE, gate)
    for rows in ROWS:
        got = kernel(x[:rows])
        assert torch.equal(got, want[:rows]), f"{rows=} {int((got != want[:rows]).sum())} differ"
    if gate is None:
        exact = _exact(rounded, w) + (0.0 if bias is None else bias.double())
        far = (want.double() - exact).abs().max() / exact.abs().max()
        assert far < (4e-3 if name == "int8" else 6e-3)


@needs_hopper
@pytest.mark.parametrize("name", ["int8", "fp8", "fp8-blocks"])
def test_sizes_of_the_streamed_kernel_change_no_bit(name: str) -> None:
    """Red when a box, a band or a stage is another's."""
    from quire.kernels.stream_configs import StreamConfig
    from quire.kernels.stream_eight_bit import StreamEightBit

    torch.manual_seed(1)
    configs = [
        StreamConfig(rows, block_m, block_k, stages, ahead, tile)
        for rows, tile in ((32, 64), (40, 64), (56, 64), (128, 128))
        for block_m, block_k, stages, ahead in ((8, 512, 2, 1), (32, 256, 3, 3), (64, 128, 4, 0))
    ]
    x = round_inputs(_spread(70, 1024), ROUNDINGS[name])
    cases = []
    with rehearsal():
        for config in configs:
            w = _weight(name, config.rows * 9, 1024)
            stream = StreamEightBit(w, None, None)
            stream(x, torch.empty(70, w.shape[0], device=CUDA, dtype=torch.bfloat16), config)
            cases.append((config, w, stream))
    for config, w, stream in cases:
        want = eight_bit_matmul(x, w, None, torch.bfloat16, ONE_TILE)
        out = torch.full_like(want, float("nan"))
        stream(x, out, config)
        assert torch.equal(out, want), config


@needs_hopper
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ["fp8", "fp8-one"])
def test_the_library_is_asked_where_it_has_our_bits(name: str, biased: bool) -> None:
    """Red when the check lets other bits pass, or refuses the library where it is what is fast."""
    torch.manual_seed(4)
    library, n, k = VendorEightBit(), 4096, 4096
    w = _weight(name, n, k)
    bias = torch.randn(n, device=CUDA).bfloat16() if biased else None
    kernel = EightBitLinear(w, ROUNDINGS[name], bias, None, library)
    assert biased or kernel.library is library
    x = _spread(700, k)
    want = eight_bit_matmul(round_inputs(x, ROUNDINGS[name]), w, bias, x.dtype, ONE_TILE)
    for rows in (129, 130, 192, 257, 384, 700):
        assert torch.equal(kernel(x[:rows]), want[:rows]), f"{rows=}"


@needs_hopper
@pytest.mark.parametrize("name", ["fp8", "fp8-one"])
def test_the_library_makes_pairs_for_a_gate(name: str) -> None:
    """Red when many rows get other bits than few, or the library is not asked; rounded for the
    next product or not."""
    torch.manual_seed(6)
    library, n, k = VendorEightBit(), 4096, 1024
    w, rounding = _weight(name, n, k, True), ROUNDINGS[name]
    kernel = EightBitLinear(w, rounding, None, "silu", library)
    assert kernel.library is library
    x = round_inputs(_spread(700, k), rounding)
    want = eight_bit_matmul(x, w, None, torch.bfloat16, ONE_TILE, "silu")
    for rows in (1, 128, 129, 192, 257, 700):
        some = RoundedRows(x.codes[:rows], x.scales[:rows])
        assert torch.equal(kernel.multiply(some, torch.bfloat16), want[:rows]), f"{rows=}"
        made = kernel.rounded(some, torch.bfloat16, ROUNDINGS["fp8"])
        _assert_same(made, round_inputs(want[:rows], ROUNDINGS["fp8"]))


@needs_hopper
@pytest.mark.parametrize("name", ["int8", "fp8", "fp8-blocks"])
@pytest.mark.parametrize("gate", [None, "silu"])
def test_tiles_of_many_rows_change_no_bit(name: str, gate: str | None) -> None:
    """Red when a tile that is not full reads or writes what is another's."""
    from quire.kernels.many_eight_bit import ManyEightBit

    torch.manual_seed(5)
    w = _weight(name, 680, 1024, gate is not None)
    x = round_inputs(_spread(300, 1024), ROUNDINGS[name])
    many = ManyEightBit(w, None, gate)
    want = eight_bit_matmul(x, w, None, torch.bfloat16, ONE_TILE, gate)
    with rehearsal():
        for tile_n in many.tiles:
            many(x, torch.empty_like(want), tile_n)
    for tile_n in many.tiles:
        out = torch.full_like(want, float("nan"))
        many(x, out, tile_n)
        assert torch.equal(out, want), tile_n


def test_rows_are_rounded_as_torch_rounds_them() -> None:
    """Red when the device rounds to eight bits otherwise than the reference."""
    torch.manual_seed(2)
    x = _spread(9, 4096)
    for dtype, largest in ((torch.int8, 127.0), (E4M3, 448.0)):
        most = torch.tensor(
            largest, device=CUDA
        )  # by a number torch multiplies, it does not divide
        got = round_inputs(x, Rounding(dtype))
        top = x.float().abs().amax(1, keepdim=True)
        scaled = x.float() * (most / top)
        want = scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)
        assert torch.equal(got.codes.view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(got.scales, top / most)


def _assert_same(got: RoundedRows, want: RoundedRows) -> None:
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(got.scales, want.scales)


@pytest.mark.parametrize("name", ["int8", "fp8", "fp8-one"])
@pytest.mark.parametrize("width", [1024, 4096, 5120, 2882])
def test_norms_that_round_have_the_bits_of_two_launches(name: str, width: int) -> None:
    """Red when a row is summed in another order, or a product and a sum become one instruction."""
    torch.manual_seed(7)
    rounding = ROUNDINGS[name]
    for dtype, weight_dtype in (
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
    ):
        x, residual = _spread(257, width).to(dtype), _spread(257, width).to(dtype)
        x[3] = 0.0
        weight = torch.randn(width, device=CUDA).to(weight_dtype)
        for rows in (1, 2, 31, 257):
            for other in (None, residual[:rows]):
                normed, stream = rms_norm(x[:rows], weight, 1e-5, other)
                got, summed = rms_norm_round(x[:rows], weight, 1e-5, rounding, other)
                _assert_same(got, round_inputs(normed, rounding))
                assert torch.equal(summed, stream)


@pytest.mark.parametrize("name", ["int8", "fp8", "fp8-one"])
@pytest.mark.parametrize("width", [1024, 14336, 17408, 2881])
def test_gates_that_round_have_the_bits_of_two_launches(name: str, width: int) -> None:
    torch.manual_seed(8)
    pairs = _spread(257, 2 * width)
    pairs[3] = 0.0
    for rows in (1, 2, 31, 257):
        made = silu_mul(pairs[:rows], interleaved=True)
        got = silu_mul_round(pairs[:rows], ROUNDINGS[name])
        _assert_same(got, round_inputs(made, ROUNDINGS[name]))


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("k", [4096, 14336, 2881])
def test_programs_that_share_a_row_change_no_code(name: str, k: int) -> None:
    torch.manual_seed(9)
    x = _spread(9, k)
    want = round_inputs(x, ROUNDINGS[name], parts=1)
    for parts in (2, 4, 8):
        _assert_same(round_inputs(x, ROUNDINGS[name], parts), want)


@needs_hopper
def test_inputs_are_read_after_the_kernel_that_writes_them() -> None:
    """In a graph, where every kernel starts as early as it may, with other inputs each time."""
    torch.manual_seed(3)
    kernels = [EightBitLinear(_weight("fp8", 1024, 1024), ROUNDINGS["fp8"], None) for _ in range(4)]

    def chain(x: Tensor) -> Tensor:
        for kernel in kernels:
            x = kernel(x)
        return x

    for m in (1, 32):
        x = _spread(m, 1024)
        chain(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain(x)
        for _ in range(20):
            x.copy_(_spread(m, 1024))
            want = x
            for kernel in kernels:
                rounded = round_inputs(want, kernel.rounding)
                want = eight_bit_matmul(rounded, kernel.weight, None, x.dtype, ONE_TILE)
                torch.cuda.synchronize()
            graph.replay()
            assert torch.equal(got, want), f"{m=}"


@needs_hopper
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_joined_kernels_read_what_the_one_before_wrote(name: str) -> None:
    """In a graph, as above: norm, gate and up, gate, down; the next norm adds what that made."""
    torch.manual_seed(10)
    rounding, library = ROUNDINGS[name], VendorEightBit()
    layers = [
        EightBitPair(
            EightBitLinear(_weight(name, 2048, 512, True), rounding, None, "silu", library),
            EightBitLinear(_weight(name, 512, 1024), rounding, None, None, library),
        )
        for _ in range(3)
    ]
    weight = torch.randn(512, device=CUDA).bfloat16()
    joints = [NormedProduct(layer, weight, 1e-5) for layer in layers]

    def chain(x: Tensor) -> tuple[Tensor, Tensor | None]:
        stream = None
        for joint in joints:
            x, stream = joint(x, stream)
        return x, stream

    def apart(x: Tensor) -> tuple[Tensor, Tensor | None]:
        stream = None
        for layer in layers:
            normed, stream = rms_norm(x, weight, 1e-5, stream)
            torch.cuda.synchronize()
            x = layer.down(layer.up(normed))
            torch.cuda.synchronize()
        return x, stream

    for m in (1, 32, 200):
        x = _spread(m, 512)
        chain(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain(x)
        for _ in range(10):
            x.copy_(_spread(m, 512))
            want = apart(x)
            graph.replay()
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), f"{m=}"


# ------------------------------------------------------------ the engine

PROMPTS = [[7 * i % 97 + 3 for i in range(length)] for length in (1, 5, 40, 200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shape(shrunk(SHAPES["8b"]), Path(tmp_path_factory.mktemp("shape")))


@pytest.fixture(scope="module", params=["fp8", "int8"])
def name(request: pytest.FixtureRequest) -> str:
    of: str = request.param
    return of


@pytest.fixture(scope="module")
def llm(name: str, folder: str) -> Iterator[LLM]:
    yield _llm(folder, load_format="dummy", quantization=name)


def _llm(folder: str, **options: object) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, kv_cache_memory=64 << 20, **options)


def _tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = llm.generate(prompts, params, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in found]


def _forms(llm: LLM) -> str:
    return next(each.value for each in llm._engine.decisions if each.what == "weights")


def test_a_request_alone_gets_the_tokens_of_a_batch(llm: LLM) -> None:
    """Red when graphs, steps of many rows or neighbours change a bit, or inputs stay floats."""
    assert "by e4m3" in _forms(llm) or "by int8" in _forms(llm)
    assert not [each for each in llm._engine.decisions if each.what == "inputs"]
    together = _tokens(llm, PROMPTS)
    assert [_tokens(llm, [prompt])[0] for prompt in PROMPTS] == together


def test_norms_are_joined_and_change_no_token(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a norm or a gate stays a launch of its own, or one that rounds has other bits."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "torch_dtype": "bfloat16"}
    wide = write_shape(shrunk(SHAPES["8b"]) | sizes, tmp_path / "wide")
    joined = _llm(wide, load_format="dummy", quantization=name)
    block = joined._engine.runner.model.blocks[0]
    assert block.store_normed is not None and block.mlp_normed is not None
    if has_hopper_kernels(CUDA):
        assert (block.mlp.both is not None) == (name == "fp8")
    want = _tokens(joined, PROMPTS)
    monkeypatch.setattr(CudaOps, "normed", lambda *_: None)
    monkeypatch.setattr(CudaOps, "chained", lambda *_: None)
    apart = _llm(wide, load_format="dummy", quantization=name)
    block = apart._engine.runner.model.blocks[0]
    assert block.mlp_normed is None and block.mlp.both is None
    assert _tokens(apart, PROMPTS) == want


def test_graphs_change_no_token(llm: LLM, name: str, folder: str) -> None:
    eager = _llm(folder, enforce_eager=True, load_format="dummy", quantization=name)
    assert _tokens(eager, PROMPTS) == _tokens(llm, PROMPTS)


def test_weights_alone(folder: str) -> None:
    """Red when there is no way to keep inputs as they are."""
    assert "by e4m3" not in _forms(_llm(folder, load_format="dummy", quantization="fp8-weights"))


def test_a_checkpoint_of_compressed_tensors(tmp_path: Path) -> None:
    """Red when what a checkpoint says of its inputs is forgotten on the way."""
    folder = tmp_path / "model"
    _write_compressed(folder)
    loaded = _llm(str(folder))
    assert "e4m3 by e4m3" in _forms(loaded)
    assert len(_tokens(loaded, PROMPTS)[0]) == 12


def _write_compressed(folder: Path) -> None:
    """A tiny model in eight-bit floats, with a scale for each token."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
    tiny_model(
        *("llama", folder),
        tokenizer=False,
        torch_dtype="bfloat16",
        num_attention_heads=4,
        num_key_value_heads=2,
        **sizes,
    )
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    for name in [each for each in stored if each.endswith("proj.weight")]:
        floats = stored[name].float()
        scale = floats.abs().amax(1, keepdim=True) / 448
        stored[name] = (floats / scale).to(E4M3)
        stored[f"{name}_scale"] = scale
    save_file(stored, folder / "model.safetensors")
