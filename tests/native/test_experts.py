"""Routing and experts of the library against torch's rule and a loop over experts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from quire.models.spec import RouterSpec
from quire.native.library import Library
from quire.native.linear import NativeLinear
from quire.nn.ops import GateForm, Visits
from quire.ops import native_rows
from quire.ops.expert_loop import ExpertLoop
from quire.ops.native_experts import NativeExperts, add_gated, can_fuse, route
from quire.ops.route import choose_experts, sigmoid
from tests.native.weights import FORMS

RULES = {
    "softmax": RouterSpec(8, 2),
    "odd numbers": RouterSpec(61, 7, normalize=False),
    "many": RouterSpec(300, 8, scale=2.5),
    "all": RouterSpec(5, 5),
    "sigmoid": RouterSpec(24, 3, score="sigmoid"),
    "groups": RouterSpec(64, 6, num_groups=8, top_groups=3, group_best=1, normalize=False),
    "sigmoid in groups": RouterSpec(
        32, 4, score="sigmoid", num_groups=4, top_groups=2, scale=2.5, correction=True
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_router_is_torchs(name: str, library: Library) -> None:
    """Red when another expert is chosen, another weight given, or bits follow rows or sets."""
    torch.manual_seed(0)
    rule = RULES[name]
    logits = torch.randn(50, rule.num_experts + 1)[:, 1:] * 3  # columns of wider rows
    correction = torch.randn(rule.num_experts) * 0.3 if rule.correction else None
    want = choose_experts(logits, rule, correction)
    first = None
    for isa in library.isas:
        library.use_isa(isa)
        got = route(library, logits, rule, correction)
        assert torch.equal(got.experts.long(), want.experts)
        torch.testing.assert_close(got.weights, want.weights, rtol=1e-5, atol=1e-7)
        first = first or got
        assert torch.equal(got.weights, first.weights), isa
        for rows in (slice(0, 1), slice(7, 30)):
            alone = route(library, logits[rows], rule, correction)
            assert torch.equal(alone.weights, first.weights[rows])


def test_of_equals_the_first_is_chosen(library: Library) -> None:
    """Red when two devices send a token to different experts. Groups that are alike, too."""
    logits = torch.zeros(3, 24)
    logits[1, [20, 9, 4]] = 1.0
    logits[2] = 1.0
    rule = RouterSpec(24, 4)
    grouped = RouterSpec(24, 4, num_groups=4, top_groups=2)
    for some, want in (
        (rule, [[0, 1, 2, 3], [4, 9, 20, 0], [0, 1, 2, 3]]),
        (grouped, [[0, 1, 2, 3], [4, 9, 0, 1], [0, 1, 2, 3]]),
    ):
        assert route(library, logits, some, None).experts.tolist() == want
        assert choose_experts(logits, some).experts.tolist() == want


def test_what_is_no_number_is_sent_somewhere(library: Library) -> None:
    """Red when a broken score leads out of the experts there are, or to one twice."""
    logits = torch.randn(4, 16)
    logits[0, 3] = float("nan")
    logits[1] = float("nan")
    logits[2] = -float("inf")
    for rule in (RouterSpec(16, 5), RouterSpec(16, 5, num_groups=4, top_groups=2)):
        for row in route(library, logits, rule, None).experts.tolist():
            assert len(set(row)) == 5 and all(0 <= expert < 16 for expert in row)


def test_a_gate_of_one_number_a_row(library: Library) -> None:
    x, added, scores = torch.randn(9, 48), torch.randn(9, 48), torch.randn(9, 5)
    got = add_gated(library, x, scores[:, 4:], added)
    torch.testing.assert_close(got, x + sigmoid(scores[:, 4:]) * added)


# ------------------------------------------------------------ products

HIDDEN, FFN, NUM = 96, 64, 6
GATES = (GateForm(), GateForm("silu", 1.702, 2.0))
EXPERTS = {
    "fp32": ("fp32", "fp32", "fp32"),
    "bf16": ("bf16", "bf16", "bf16"),
    "4 bits": ("4 bits", "4 bits", "4 bits"),
    "gate and up apart": ("4 bits, offsets", "6 bits", "8 bits"),
    "packed, then floats": ("table, powers", "table, powers", "fp16"),
    "floats, then packed": ("fp32", "fp32", "5 bits"),
}


def linears(forms: tuple[str, str, str], library: Library) -> tuple[list[NativeLinear], ...]:
    gate, up, down = (FORMS[form] for form in forms)

    def wide() -> NativeLinear:
        return NativeLinear.of([gate(FFN, HIDDEN), up(FFN, HIDDEN)], torch.randn(2 * FFN), library)

    def narrow() -> NativeLinear:
        return NativeLinear.of([down(HIDDEN, FFN)], torch.randn(HIDDEN), library)

    return [wide() for _ in range(NUM)], [narrow() for _ in range(NUM)]


def draw_visits(count: int, top_k: int) -> Visits:
    """Some experts have many visitors, one none."""
    likely = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0, 0.0])
    experts = torch.multinomial(likely.expand(count, -1), top_k)
    return Visits(experts, torch.rand(count, top_k))


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_a_loop_over_them(name: str, gate: GateForm, library: Library) -> None:
    """Red when a visitor meets another expert's weights, or bits follow rows, threads or sets."""
    torch.manual_seed(0)
    up, down = linears(EXPERTS[name], library)
    assert can_fuse(up, down)
    fused = NativeExperts(up, down, gate)
    loop = ExpertLoop(up, down, partial(_gate, library, gate))
    x, visits = torch.randn(600, HIDDEN), draw_visits(600, 3)  # more than are done at once
    counts, loads = torch.zeros(NUM, dtype=torch.int64), torch.zeros(NUM, dtype=torch.int64)
    want = loop(x, visits, counts)
    for isa, threads in ((library.isas[0], 1), (library.isas[0], 3), (library.isas[-1], 2)):
        library.use_isa(isa)
        library.set_threads(threads)
        loads.zero_()
        assert torch.equal(fused(x, visits, loads), want), (isa, threads)
        assert torch.equal(loads, counts)
        for rows in (slice(5, 6), slice(1, 4), slice(40, 61), slice(0, 0)):
            some = Visits(visits.experts[rows], visits.weights[rows])
            assert torch.equal(fused(x[rows], some, None), want[rows]), (isa, threads, rows)


def _gate(library: Library, form: GateForm, x: Tensor) -> Tensor:
    return native_rows.gate(library, x, form)


def test_what_is_not_alike_is_not_fused(library: Library) -> None:
    """Red when rows rounded for one form are read by another."""
    up, down = linears(("4 bits", "2 bits, int8 inputs", "4 bits"), library)
    assert not can_fuse(up, down)
    up, down = linears(("4 bits", "fp32", "4 bits"), library)
    assert not can_fuse(up, down)
