from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.kernel_times import Slice, Span, by_name, is_work, kind_of, own_times, shares
from tests.rules.source import trees

spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(
        lambda pair: Span("k", pair[0], pair[0] + pair[1])
    )
)


@given(spans)
def test_own_times_add_up_to_the_time_in_which_something_ran(found):
    """Red when overlapping kernels are charged twice."""
    busy = {tick for _, start, end in found for tick in range(int(start), int(end))}
    assert sum(piece.micros for piece in own_times(found)) == len(busy)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("matmul_kernel", "products"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(float)", "other"),
        ("_grouped_kernel", "experts"),
        ("_split_kernel", "attention"),
        ("_merge_kernel", "attention"),
        ("_prefill_kernel", "attention"),
        ("_rope_kv_write_kernel", "cache write"),
        ("_rms_norm_kernel", "norms"),
        ("_silu_mul_kernel", "activation"),
        ("_scan_tiles", "sampling"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("aten::addmm", "products"),
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "products"),
        ("something new", "other"),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name) == kind


def test_the_kernels_of_a_dense_step_still_have_these_names():
    """Red when a kernel is renamed and its time would silently move to 'other'."""
    kernels = {
        "matmul_kernel", "stream_matmul_kernel", "_split_kernel", "_merge_kernel", "_shared_kernel",
        "_prefill_kernel", "_hopper_kernel", "_hopper_split_kernel", "_rope_kv_write_kernel",
        "_rms_norm_kernel", "_silu_mul_kernel", "_scan_tiles", "_pick_rows",
    }  # fmt: skip
    defined = {
        node.name
        for path, tree in trees().items()
        if path.startswith("quire/kernels/")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    assert kernels - defined == set()
    assert "other" not in {kind_of(name) for name in kernels}


def step(extra: int = 0) -> list[Slice]:
    layer = [
        Slice("_rms_norm_kernel", 1),
        Slice("matmul_kernel", 10),  # qkv
        Slice("_split_kernel", 5),
        Slice("nvjet_sm90_tst_96x128", 20),  # out
        Slice("matmul_kernel", 30),  # up
        Slice("matmul_kernel", 40),  # down
    ]
    return [*layer * 3, Slice("matmul_kernel", 50), *[Slice("matmul_kernel", 1)] * extra]


def test_products_are_told_apart_by_their_order():
    found = {share.kind: share for share in shares(step() * 2, num_steps=2, num_layers=3)}
    assert {kind: share.micros for kind, share in found.items()} == {
        "qkv": 30, "out": 60, "up": 90, "down": 120, "head": 50, "attention": 15, "norms": 3,
    }  # fmt: skip
    assert found["qkv"].launches == 3 and found["out"].names == ("nvjet_sm90_tst_96x128",)


def test_products_stay_together_when_their_number_is_not_a_dense_models():
    found = {share.kind: share.micros for share in shares(step(extra=1), 1, 3)}
    assert found == {"products": 351, "attention": 15, "norms": 3}


def test_by_name_is_per_step_and_the_longest_first():
    slices = [Slice("a", 1), Slice("b", 6), Slice("a", 3)]
    assert list(by_name(slices, 2).items()) == [("b", (0.5, 3.0)), ("a", (1.0, 2.0))]


def test_waiting_is_not_work():
    names = ("Context Sync", "Stream Wait Event", "matmul_kernel")
    assert [name for name in names if is_work(name)] == ["matmul_kernel"]
