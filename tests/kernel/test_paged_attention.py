"""Paged attention kernels: every shape they must take, and bits that depend on none of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.attn.reference import ReferenceAttention
from quire.attn.triton import LONGEST_WALK, TritonAttention, lanes_of
from quire.kernels.paged_tile import Launch, PagedConfig, default_config
from tests.paged_case import make_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ORACLE = ReferenceAttention()  # same cache layout, and quicker to write through here
TILES = PagedConfig(16, 32, Launch(16, 4, 2), Launch(32, 4, 2))
# One tile shape for both paths: the interpreter's matrix product may round by shape.
EQUAL = PagedConfig(16, 32, Launch(16, 4, 2), Launch(16, 4, 2))
GROWING = PagedConfig(16, 16, Launch(16, 4, 2), Launch(16, 4, 2), octave=1)  # 0 16 32 64 128 256

QUERIES = [1, 11, 3, 1]
CONTEXTS = [1, 39, 20, 70]


def check(got: torch.Tensor, want: torch.Tensor, tol: float) -> None:
    assert torch.isfinite(got).all()
    error = (got.double() - want).norm() / want.norm()
    assert error < tol, f"relative error {error:.2e}"


@pytest.mark.parametrize(
    "heads, head_dim, page_size",
    [
        ((2, 2), 32, 16),
        ((3, 1), 32, 32),
        ((4, 1), 80, 16),
        ((7, 1), 32, 16),
        ((8, 1), 96, 16),
        ((16, 1), 32, 64),
    ],
    ids=str,
)
def test_mixed_batch(heads: tuple[int, int], head_dim: int, page_size: int) -> None:
    backend = TritonAttention(torch.float32, TILES)
    case = make_case(CONTEXTS, heads=heads, head_dim=head_dim, page_size=page_size, device=DEVICE)
    cache = case.cache(backend, fill=float("nan"))  # unwritten slots must not leak
    case.feed(ORACLE, cache, CONTEXTS)
    check(case.step(backend, cache, QUERIES, CONTEXTS), case.expected(QUERIES, CONTEXTS), 1e-6)


@pytest.mark.parametrize("dtype, tol", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str)
def test_half_precision(dtype: torch.dtype, tol: float) -> None:
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies bf16 matrices as integers")
    backend = TritonAttention(dtype, TILES)
    case = make_case(CONTEXTS, heads=(4, 1), dtype=dtype, device=DEVICE)
    cache = case.cache(backend)
    case.feed(ORACLE, cache, CONTEXTS)
    check(case.step(backend, cache, QUERIES, CONTEXTS), case.expected(QUERIES, CONTEXTS), tol)


@pytest.mark.parametrize("context", [31, 32, 33, 64, 65])
def test_decode_across_split_borders(context: int) -> None:
    backend = TritonAttention(torch.float32, TILES)
    case = make_case([context], heads=(4, 1), device=DEVICE)
    cache = case.cache(backend, fill=float("nan"))
    case.feed(ORACLE, cache, [context])
    check(case.step(backend, cache, [1], [context]), case.expected([1], [context]), 1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunk_size_changes_no_bit(chunk: int) -> None:
    """Chunks of 1 and 3 run split kernels, longer ones prefill; 58 .. 70 crosses a split border."""
    backend = TritonAttention(torch.float32, EQUAL)
    case = make_case([70], heads=(4, 1), device=DEVICE)
    cache = case.cache(backend, fill=float("nan"))
    case.feed(ORACLE, cache, [58])
    whole = case.step(backend, cache, [12], [70])
    ends = [*range(58 + chunk, 70, chunk), 70]
    starts = [58, *ends[:-1]]
    parts = [case.step(backend, cache, [b - a], [b]) for a, b in zip(starts, ends, strict=True)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("tiles", [TILES, GROWING], ids=["equal", "growing"])
def test_bound_and_lanes_change_no_bit(tiles: PagedConfig) -> None:
    lens = [1, 33, 70] if tiles is TILES else [131]
    backend = TritonAttention(torch.float32, tiles)
    case = make_case(lens, heads=(4, 2), device=DEVICE)
    cache = case.cache(backend, fill=float("nan"))
    case.feed(ORACLE, cache, lens)
    ones = [1] * len(lens)
    want = case.step(backend, cache, ones, lens)
    check(want, case.expected(ones, lens), 1e-6)
    for bound in (lens[-1], 256, 300):
        assert torch.equal(case.step(backend, cache, ones, lens, max_context=bound), want)
    for programs in (1, 12, 64):  # one lane that folds, two, one for each split
        backend = TritonAttention(torch.float32, replace(tiles, programs=programs))
        assert torch.equal(case.step(backend, cache, ones, lens, max_context=200), want)


KINDS = {
    "plain": {},
    "window": {"window": 21},
    "window of one": {"window": 1},
    "cap and sinks": {"softcap": 2.0, "has_sinks": True},
    "all": {"window": 37, "softcap": 2.0, "has_sinks": True},
}


@pytest.mark.parametrize("tiles", [EQUAL, GROWING], ids=["equal", "growing"])
@pytest.mark.parametrize("kind", KINDS)
def test_decode_draft_and_prefill_have_the_same_bits(kind: str, tiles: PagedConfig) -> None:
    """63 .. 68 crosses a split border, the windows' edges one of splits or tiles before it."""
    backend = TritonAttention(torch.float32, tiles)
    case = make_case([68], heads=(4, 1), device=DEVICE, **KINDS[kind])
    cache = case.cache(backend, fill=float("nan"))
    case.feed(ORACLE, cache, [68])
    whole = case.step(backend, cache, [6], [68])  # prefill: more than the four of a split tile
    check(whole, case.expected([6], [68]), 1e-6)
    draft = case.step(backend, cache, [3], [67])
    assert torch.equal(draft, whole[2:5])
    decoded = torch.cat([case.step(backend, cache, [1], [n]) for n in (63, 65, 68)])
    assert torch.equal(decoded, whole[[0, 2, 5]])


@pytest.mark.parametrize("queries", [1, 6])
def test_a_tile_may_reach_behind_the_window(queries: int) -> None:
    """Red when the stale page that shares a tile with the window's first page is read: NaNs."""
    wide = PagedConfig(32, 64, Launch(16, 4, 2), Launch(16, 4, 2))
    backend = TritonAttention(torch.float32, wide)
    case = make_case([74], heads=(4, 1), device=DEVICE, window=21)
    cache = case.cache(backend, fill=float("nan"))
    case.feed(ORACLE, cache, [74])
    got = case.step(backend, cache, [queries], [74])  # pages of 16: 48 .. are there, 32 .. are not
    check(got, case.expected([queries], [74]), 1e-6)


@pytest.mark.skipif(DEVICE == "cuda", reason="counts the interpreter's products")
@pytest.mark.parametrize("queries", [1, 12], ids=["split", "prefill"])
def test_work_follows_the_window(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when tiles behind the window are walked, though none of their keys is read."""
    from triton.runtime.interpreter import InterpreterBuilder

    num_dots, create_dot = 0, InterpreterBuilder.create_dot

    def counted(*args: object) -> object:
        nonlocal num_dots
        num_dots += 1
        return create_dot(*args)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted)
    case = make_case([610], heads=(4, 1), device=DEVICE, window=21)
    found = []
    for context in (130, 610):  # the same place in a tile and in a split
        backend = TritonAttention(torch.float32, TILES)
        cache = case.cache(backend)
        num_dots = 0
        case.step(backend, cache, [queries], [context])
        found.append(num_dots)
    assert found[0] == found[1] > 0


def test_a_windows_scratch_does_not_grow_with_the_bound() -> None:
    """Red when a captured decode pays for splits that no window can reach."""
    backend = TritonAttention(torch.float32, TILES)
    for window, splits in ((1, 1), (2, 2), (33, 2), (34, 3)):  # splits of 32
        case = make_case([200, 90], window=window, heads=(4, 1), device=DEVICE)
        plan = backend.plan(case.batch([1, 1], [200, 90], [0, 1]), case.spec, 1 << 20)
        assert plan.split is not None and plan.split.max_splits == splits
        assert plan.split.acc.numel() == (splits * 2 * 4 * 32 if splits > 1 else 0)
        eager = backend.plan(case.batch([1, 1], [200, 90], [0, 1]), case.spec)
        assert eager.split is not None and eager.split.max_splits <= splits


def test_a_bounded_windowed_plan_changes_no_bit() -> None:
    lens = [1, 33, 70, 65]
    backend = TritonAttention(torch.float32, TILES)
    case = make_case(lens, heads=(4, 1), device=DEVICE, **KINDS["all"])
    cache = case.cache(backend, fill=float("nan"))
    case.feed(ORACLE, cache, lens)
    want = case.step(backend, cache, [1] * 4, lens)
    check(want, case.expected([1] * 4, lens), 1e-6)
    assert torch.equal(case.step(backend, cache, [1] * 4, lens, max_context=1000), want)


def test_scratch_only_grows() -> None:
    """A captured graph keeps writing to the buffer it was captured with."""
    backend = TritonAttention(torch.float32, TILES)
    case = make_case([64], device=DEVICE)
    batch = case.batch([1], [64], [0])
    small = backend.plan(batch, case.spec, max_context=64)
    large = backend.plan(batch, case.spec, max_context=1 << 20)
    assert small.split is not None and large.split is not None
    kept = {t.data_ptr() for t in backend._scratch}
    assert {small.split.acc.data_ptr(), large.split.acc.data_ptr()} <= kept
    again = backend.plan(batch, case.spec, max_context=64)
    assert again.split is not None
    assert again.split.acc.data_ptr() == large.split.acc.data_ptr()


CONFIG = default_config(128, torch.bfloat16)


@pytest.mark.parametrize(
    ("programs", "context", "lanes"),
    [
        *[(8, 2048, 32), (8, 131072, 32), (128, 8192, 2)],
        *[(240, 2048, 2), (256, 2048, 1), (256, 8192, 2), (512, 8192, 1)],
    ],
)
def test_lanes_fill_the_chip(programs: int, context: int, lanes: int) -> None:
    assert lanes_of(programs, CONFIG.splits.count(context), CONFIG) == lanes


@pytest.mark.parametrize("programs", [8, 128, 512, 4096])
def test_no_lane_walks_a_long_context_alone(programs: int) -> None:
    """Red when one long request among many short ones keeps a single program busy at the end."""
    for context in (1, 8192, 8193, 32768, 131072):
        lanes = lanes_of(programs, CONFIG.splits.count(context), CONFIG)
        assert lanes * LONGEST_WALK * CONFIG.split_size >= context
