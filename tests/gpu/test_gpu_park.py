"""Engines that leave their GPU memory and take it again: tokens, graphs and memory are as before.

Red when an address changes, a byte of the weights is lost, pages come back with what was there, a
graph is captured anew, memory is not given back, or prefixes are found whose pages are gone.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.bench.shapes import SHAPES, write_shape
from quire.engine import tier_parts
from quire.engine.build import Engine, build_engine
from quire.engine.parking import Parking
from quire.errors import OutOfMemory
from quire.flat_args import args_of
from quire.load.open import open_model
from quire.params import SamplingParams
from quire.request import Request
from quire.sched.costs import StepCosts
from quire.tiers.tempo import Tempo

FORMS = (None, "rtn-int4-g32", "fp8-weights")
PAGES = 512 << 20
NEAR = 48 << 20  # what torch and the driver may keep of their own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """440 MB of weights in bf16, most of them the embedding's."""
    config = {**SHAPES["0.6b"], "num_hidden_layers": 4}
    return write_shape(config, Path(tmp_path_factory.mktemp("shape")))


def engine_of(folder: str, parks: bool = True, **changes: Any) -> Engine:
    args = args_of(
        {
            "model": folder,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "device": "cuda",
            "seed": 0,
            "kv_cache_memory": PAGES,
            "max_model_len": 1024,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 512,
            **changes,
        }
    )
    return build_engine(args, open_model(args).checkpoint, parks=parks)


def parking_of(engine: Engine) -> Parking:
    said = [each for each in engine.decisions if each.what == "parking"]
    assert engine.parking is not None, said
    return engine.parking


def requests() -> list[Request]:
    """Greedy and sampled, some with a common prefix."""
    draw = random.Random(3)
    some = [
        [draw.randrange(3, 30_000) for _ in range(n)] for n in (100, 1, 40, 300, 17, 64, 5, 200)
    ]
    some += [some[0] + some[1], some[3]]
    made = []
    for id, prompt in enumerate(some):
        params = SamplingParams(temperature=0.9 * (id % 2), max_tokens=24, ignore_eos=True)
        made.append(Request.new(id, prompt, params, seed=1000 + id, arrival=float(id)))
    return made


def run(engine: Engine, asked: list[Request]) -> list[list[int]]:
    for request in asked:
        engine.core.add(request)
    while engine.core.has_work:
        engine.core.step()
    return [request.output for request in asked]


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def rubbish(num_bytes: int) -> None:
    """Whoever has the memory meanwhile leaves NaN in it."""
    held = torch.full((num_bytes,), 255, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    del held
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


class Replays:
    """Counts replays of graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        replay = torch.cuda.CUDAGraph.replay

        def counted(graph: torch.cuda.CUDAGraph) -> None:
            self.count += 1
            replay(graph)

        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_the_same(
    form: str | None, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = engine_of(folder, parks=False, quantization=form)
    assert plain.parking is None
    want = run(plain, requests())
    del plain
    gc.collect()
    torch.cuda.empty_cache()

    replays = Replays(monkeypatch)
    engine = engine_of(folder, quantization=form)
    parking, place = parking_of(engine), parking_of(engine)._place
    for _ in range(2):  # the second finds prefixes, and captures what such steps need
        assert run(engine, requests()) == want
    assert engine.runner.graphs is not None
    graphs, num_replays = dict(engine.runner.graphs.graphs), replays.count
    assert graphs and num_replays > 0
    taken = place.weight_bytes + place.page_bytes
    assert place.page_bytes >= PAGES * 0.9
    for _ in range(2):
        torch.cuda.empty_cache()
        before = free()
        parking.park()
        left = free()
        assert left - before >= taken - NEAR, (before, left, taken)
        rubbish(int(taken * 0.98))
        parking.unpark()
        assert abs(free() - before) <= NEAR
        again = requests()
        assert run(engine, again) == want
        assert again[0].num_cached == 0, "a page that is gone"
        assert {key: engine.runner.graphs.graphs[key] for key in graphs} == graphs
        assert len(engine.runner.graphs.graphs) == len(graphs) and replays.count > num_replays
        more = requests()
        assert run(engine, more) == want and more[0].num_cached > 0, "the cache fills again"


def test_memory_that_others_have(folder: str) -> None:
    """It stays parked, says how much is missing, and comes back when there is room."""
    engine = engine_of(folder)
    want = run(engine, requests())
    parking = parking_of(engine)
    parking.park()
    held = torch.empty(free() - (256 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(OutOfMemory, match="of GPU memory"):
        parking.unpark()
    assert parking.is_parked
    del held
    torch.cuda.empty_cache()
    parking.unpark()
    assert run(engine, requests()) == want


def test_an_engine_that_ends_gives_all_back(folder: str) -> None:
    """At home and while it is away; red when addresses or memory are held for nobody."""
    for is_parked in (False, True):
        torch.cuda.empty_cache()
        before = free()
        engine = engine_of(folder)
        run(engine, requests()[:2])
        if is_parked:
            parking_of(engine).park()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        assert before - free() <= 4 * NEAR, (is_parked, before, free())  # kernels stay


def test_tiers_keep_what_they_have(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes in memory of the host are found after a return, and are right."""
    monkeypatch.setattr(Tempo, "is_worth", lambda *args: True)
    monkeypatch.setattr(tier_parts, "chunk_times", lambda *args: StepCosts.of([(1, 1.0)]))
    engine = engine_of(folder, kv_host_memory=256 << 20)
    want = run(engine, requests())
    assert engine.tiers is not None
    parking = parking_of(engine)
    for _ in range(2):
        parking.park()
        rubbish(PAGES // 2)
        parking.unpark()
        again = requests()
        assert run(engine, again) == want
        assert sum(request.num_cached for request in again) > 100
    engine.tiers.close()


def test_pages_are_sized_as_without(folder: str) -> None:
    """Red when memory that loading needed for a moment is counted as taken, or not at all."""
    found = []
    for parks in (False, True):
        engine = engine_of(
            folder,
            parks,
            quantization="rtn-int4-g32",
            kv_cache_memory=None,
            gpu_memory_utilization=0.05,  # few enough bytes that requests could use more pages
            max_num_seqs=1024,
        )
        found.append(engine.core.scheduler.kv.allocator.num_pages)
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    assert abs(found[0] - found[1]) <= 0.02 * found[0], found
