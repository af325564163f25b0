"""A profile's parts add up to the step, and each stands beside what it must move."""

from __future__ import annotations

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from quire.bench.profile import ProfileOptions, Profiler, slices_of
from quire.bench.profile_report import COLUMNS, markdown, profile_rows
from quire.bench.roofline import Feed, step_loads
from quire.bench.shapes import SHAPES, shrunk, write_shape
from quire.errors import BadRequest
from quire.llm import LLM

OPTIONS = ProfileOptions(batches=(1, 5), prefills=(40,), context=24, steps=3)


@pytest.fixture(scope="module")
def profiler(tmp_path_factory, without_native_steps):
    folder = write_shape(shrunk(SHAPES["8b"]), tmp_path_factory.mktemp("shape"))
    options = {"num_threads": 1, "kv_cache_memory": 8 << 20, "max_model_len": 256}
    return Profiler(LLM(folder, load_format="dummy", skip_tokenizer_init=True, **options))


@pytest.fixture(scope="module")
def found(profiler):
    return profiler.run(OPTIONS)


def test_one_profile_for_each_step_asked_for(found):
    assert [step.what for step in found] == [
        "decode, batch 1",
        "decode, batch 5",
        "prefill, 40 tokens",
    ]


def test_parts_add_up_to_the_watched_step(found):
    for step in found:
        whole = sum(line.micros for line in step.lines) + step.idle_us
        assert whole == pytest.approx(step.profiled_us, rel=1e-6)
        assert sum(micros for _, micros in step.kernels.values()) == pytest.approx(
            sum(line.micros for line in step.lines)
        )
        assert step.idle_us > 0 and step.step_us > 0


def test_products_are_named_and_launched_once_a_layer(found):
    for step in found:
        launches = {line.kind: line.launches for line in step.lines}
        assert {kind: launches[kind] for kind in ("qkv", "out", "up", "down", "head")} == {
            "qkv": 2, "out": 2, "up": 2, "down": 2, "head": 1,
        }  # fmt: skip
        assert launches["attention"] >= 2


def test_bytes_are_those_of_this_batch_at_this_context(found, profiler):
    by_kind = {line.kind: line for line in found[1].lines}
    loads = step_loads(profiler.spec, [Feed(24 + 3, 1)] * 5, 4)
    for kind in ("qkv", "head", "attention"):
        assert by_kind[kind].num_bytes == loads[kind].num_bytes > 0
        assert by_kind[kind].floor == pytest.approx(loads[kind].seconds(profiler.ceilings) * 1e6)
    assert by_kind["norms"].num_bytes == by_kind["norms"].floor == 0


def test_nobody_finishes_while_measured_and_nothing_is_left_behind(profiler):
    """Prompts of the last are read while the first decode: they must not run out of tokens."""
    step = profiler.decode(32, ProfileOptions(context=128, steps=2))
    assert step.what == "decode, batch 32"  # decode asserts that all 32 still ran
    assert profiler.llm.stats().num_running == profiler.llm.stats().num_waiting == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (ProfileOptions(batches=(64,), steps=2), "batch 64"),
        (ProfileOptions(batches=(1,), context=250), "context and steps"),
        (ProfileOptions(batches=(), prefills=(4096,), context=8), "prefill 4096"),
    ],
)
def test_what_the_engine_cannot_take_is_said_before_measuring(profiler, options, named):
    with pytest.raises(BadRequest, match=named):
        profiler.run(options)


def event(name: str, device: DeviceType, start: float, end: float) -> FunctionEvent:
    return FunctionEvent(id=1, name=name, thread=1, start_us=start, end_us=end, device_type=device)


def test_a_gpu_profile_counts_kernels_and_not_the_calls_that_launch_them():
    """The second kernel starts early, under the first: it is charged for what it adds."""
    events = [
        event("cudaGraphLaunch", DeviceType.CPU, 0, 50),
        event("matmul_kernel", DeviceType.CUDA, 12, 20),
        event("_split_kernel", DeviceType.CUDA, 10, 15),
        event("Stream Sync", DeviceType.CUDA, 0, 90),
    ]
    assert slices_of(events, is_cuda=True) == [("_split_kernel", 5.0), ("matmul_kernel", 5.0)]


def test_tables_have_a_cell_for_every_column(found, profiler):
    rows = profile_rows(found[0])
    assert {len(row) for row in rows} == {len(COLUMNS)}
    assert [row[0] for row in rows[-2:]] == ["between kernels", "whole step"]
    text = markdown(found, profiler.ceilings)
    assert text.count("### ") == 3 and "| kernel | launches | us |" in text
