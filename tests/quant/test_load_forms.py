"""Forms made at load: near the weights they stand for, and on the grids of reference packages."""

from __future__ import annotations

import pytest
import torch

from quire.errors import NotSupported
from quire.load.wish import HEADS, Wish
from quire.quant.codebook import Codebook
from quire.quant.coded import Coded
from quire.quant.form_name import ALONE, SPARSE24, WORDS, is_form
from quire.quant.load_forms import NF4, load_form
from quire.quant.scaled import Scaled
from quire.quant.sparse24 import Sparse24
from tests.load.held import vectors

KINDS = {"fp8": Scaled, "int8": Coded, "nf4": Codebook, "mxfp4": Coded}
# Half the widest step between neighbours, over the largest number that shares its scale.
ROUNDED = [word for word in WORDS if word != SPARSE24]
HALF_STEPS = {"fp8": 1 / 28, "int8": 1 / 254, "nf4": 0.152, "mxfp4": 0.25}


def weight() -> torch.Tensor:
    torch.manual_seed(0)
    made = torch.randn(10, 192) * torch.rand(10, 1)
    made[3, :64] = 0.0  # groups of zeros
    made[4] = 0.0  # a row of zeros
    made[5, 40] = 30.0  # an outlier
    return made


@pytest.mark.parametrize("name", ROUNDED)
def test_near_what_they_stand_for(name: str) -> None:
    """Red when scales belong to other weights, a sign is lost, or a range is not covered."""
    given, form = weight(), load_form(name)
    made = form.of(given)
    name = name.removesuffix(ALONE)
    assert made is not None and type(made) is KINDS[name] and made.shape == (10, 192)
    got = made.dequantize()
    width = {"fp8": 192, "int8": 192, "nf4": 64, "mxfp4": 32}[name]
    most = given.view(10, -1, width).abs().amax(-1, keepdim=True)
    error = (got - given).view(10, -1, width).abs()
    assert (error <= HALF_STEPS[name] * most * 1.002 + 1e-7).all()
    assert (got[3, :32] == 0.0).all() and (got[4] == 0.0).all()
    assert (got.sign() * given.sign() >= 0).all()


@pytest.mark.parametrize(
    "name, file, case",
    [
        ("nf4", "bitsandbytes", "nf4"),
        ("mxfp4", "compressed-tensors", "mxfp4"),
    ],
)
def test_what_a_package_rounded_stays(name: str, file: str, case: str) -> None:
    """Red when our grid is not the reference package's: its weights would move."""
    want = vectors(file)[case].want.float()
    made = load_form(name).of(want)
    assert made is not None
    torch.testing.assert_close(made.dequantize(), want, rtol=1e-6, atol=0)


def test_eight_bit_floats_are_the_nearest() -> None:
    """Red when another of the 253 numbers, times its row's scale, is nearer to a weight."""
    given = weight()
    made = load_form("fp8").of(given)
    assert isinstance(made, Scaled) and torch.allclose(made.scales[:, 0] * 448, given.abs().amax(1))
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = numbers[numbers.isfinite()] * made.scales.unsqueeze(-1)  # [out, 1, numbers]
    best = (given.unsqueeze(-1) - grid).abs().amin(-1)
    assert ((made.dequantize() - given).abs() <= best * 1.0001 + 1e-9).all()


def test_four_bit_floats_round_to_even() -> None:
    """Red when ties go another way than the microscaling specification's."""
    row = torch.zeros(1, 32)
    row[0, :9] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75])
    made = load_form("mxfp4").of(row)
    assert made is not None
    assert made.dequantize()[0, :9].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -1.0]


def test_values_are_those_of_the_package() -> None:
    stored = vectors("bitsandbytes")["nf4"].tensors["w.weight.quant_map"]
    assert tuple(stored.tolist()) == NF4


@pytest.mark.parametrize("name", WORDS)
def test_what_no_form_fits_stays_as_it_is(name: str) -> None:
    assert load_form(name).of(torch.full((4, 64), torch.nan)) is None
    odd = load_form(name).of(torch.randn(4, 39))
    assert (odd is not None) == name.startswith("fp8")


def test_only_gpus_round_inputs_and_only_of_layers() -> None:
    """Red when a CPU, a head, or a word for weights alone gets rounded inputs."""
    floats, head = torch.randn(4, 64), Wish(form=load_form("fp8", on_gpu=True)).form_of(HEADS[0])
    assert head is not None
    for form, want in (
        (load_form("fp8", on_gpu=True), "fp8-row"),
        (load_form("int8", on_gpu=True), "int8-row"),
        (load_form("fp8-weights", on_gpu=True), "float"),
        (load_form("int8-weights", on_gpu=True), "float"),
        (load_form("fp8"), "float"),
        (load_form("int8"), "float"),
        (head, "float"),
    ):
        made = form.of(floats)
        assert made is not None and made.inputs == want


@pytest.mark.parametrize("name", ROUNDED)
def test_heads_get_eight_bits(name: str) -> None:
    """Red when an embedding is kept in four bits, or a router is rounded at all."""
    wish = Wish(form=load_form(name))
    assert wish.form_of("layers.0.router.weight") is None
    for head in ("embed.weight", "head.weight"):
        form = wish.form_of(head)
        made = form.of(torch.randn(4, 64)) if form else None
        assert made is not None and made.num_bytes >= 4 * 64


def test_heads_beside_floats_are_whole_numbers() -> None:
    """Red when a head beside `fp8` is off by more than its bytes must cost."""
    head = Wish(form=load_form("fp8", on_gpu=True)).form_of("head.weight")
    given = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    floats, whole = load_form("fp8").of(given), head.of(given) if head else None
    assert floats is not None and whole is not None and whole.num_bytes <= floats.num_bytes
    moved = [(made.dequantize() - given).square().sum() for made in (floats, whole)]
    assert moved[1] < moved[0] / 5


def test_the_larger_two_of_every_four_stay() -> None:
    """Red when another weight is left out than the smallest, one that stays is changed, or a head
    loses any."""
    given = weight().bfloat16().float()
    made = load_form(SPARSE24).of(given)
    assert isinstance(made, Sparse24) and made.values.dtype == torch.bfloat16
    got, runs = made.dequantize().float().view(10, -1, 4), given.view(10, -1, 4)
    border = runs.abs().sort(-1).values[..., 2:3]
    assert torch.equal(torch.where(runs.abs() >= border, runs, 0.0), got)
    of_head = Wish(form=load_form(SPARSE24)).form_of("head.weight")
    assert of_head is not None and of_head.of(given) is None


def test_words_that_mean_nothing() -> None:
    assert all(map(is_form, WORDS)) and not is_form("int3")
    with pytest.raises(NotSupported, match="got quantization='int3', want fp8, int8, nf4, mxfp4"):
        load_form("int3")
