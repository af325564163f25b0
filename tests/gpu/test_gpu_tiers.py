"""Pages to and from a pool on a GPU: tokens are those of an engine that keeps nothing elsewhere.

`tests/tiers/test_device.py` judges the same code with lanes that are late on purpose; here streams,
events, locked memory and CUDA IPC are real, graphs replay and a step is launched ahead. Red when a
page is copied before it is written or after it was given away, when a step waits for a copy, or
when pages cross between a CPU and a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import tests.hf as hf
from quire.disagg.ipc_mover import IpcMover
from quire.disagg.sockets import SocketConnector
from quire.engine import tier_parts
from quire.engine.build import Engine
from quire.kv.groups import PageNeeds
from quire.kv.prefix import GONE
from quire.kv.tier_index import Landing
from quire.memory.device_transfer import DeviceTransfer
from quire.request import Request
from quire.sched.costs import StepCosts
from quire.tiers.tempo import Tempo
from tests.gpu import test_engine_gpu as base
from tests.gpu import test_gpu_mla as mla
from tests.gpu.test_gpu_windows import MODELS
from tests.rules.source import ROOT
from tests.tiers.test_apart import compute

MEMORY = {"kv_host_memory": 1 << 25}
FAST = 1 << 30  # cycles of a GPU: about half a second


def windowed() -> Any:
    base.FAMILIES["windowed"] = MODELS["full and windowed"]
    return base.model_of("windowed")


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "floats": (lambda: base.model_of("llama"), {}),
    "full and windowed": (windowed, {}),
    "int8": (lambda: base.model_of("qwen3"), {"kv_cache_dtype": "int8"}),
    "latents": (lambda: mla.engine_model("v2-lite"), {}),
}


@pytest.fixture(autouse=True)
def always_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models compute faster than anything is loaded, and need not be measured."""
    monkeypatch.setattr(Tempo, "is_worth", lambda *args: True)
    monkeypatch.setattr(tier_parts, "chunk_times", lambda *args: StepCosts.of([(1, 1.0)]))


class Case:
    """A model, and what an engine of it says that keeps no pages elsewhere."""

    def __init__(self, name: str) -> None:
        make_model, self.args = CASES[name]
        self.name, self.model = name, make_model()
        self.plain = self.engine()
        self.want = base.run(self.plain, requests())

    def engine(self, **changes: Any) -> Engine:
        return base.engine_of(self.model, **{**self.args, **changes})


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.fixture(scope="module")
def floats() -> Case:
    return Case("floats")


def requests() -> list[Request]:
    some = base.prompts(12, seed=2)
    some += [some[0] + some[1][:40], some[0] + some[2][:17], some[3]]
    return [base.make(i, p, 40, 0.8 * (i % 2)) for i, p in enumerate(some)]


def settle(engine: Engine) -> None:
    """Until all copies are out, and nobody holds what was brought."""
    tiers, transfer = engine.tiers, engine.runner.transfer
    assert tiers is not None and isinstance(transfer, DeviceTransfer)
    torch.cuda.synchronize()
    assert tiers.flush(60.0) and tiers._lifter.wait(60.0)
    transfer._forget()
    assert tiers.memory._pinned == {} and not transfer._reading and not transfer._loading


def pages_are_kept(engine: Engine) -> int:
    """How many nodes the pool and memory both have; their bytes must be the same."""
    tiers, pool, found = engine.tiers, engine.runner.pool, 0
    assert tiers is not None
    for node in {n for n in engine.core.scheduler.kv.allocator.node_of if n is not None}:
        kept = tiers.memory._nodes.get(node.key)
        if kept is None or kept.data is None or GONE in node.pages:
            continue
        assert bytes(kept.data) == bytes(pool.export(node.pages))
        found += 1
    return found


def test_rows_are_what_is_exported(case: Case) -> None:
    pool = case.plain.runner.pool
    pages, targets = [9, 2, 7], [3, 11, 5]
    rows = torch.zeros(3, pool.page_bytes, dtype=torch.uint8, device="cuda")
    with torch.inference_mode():
        pool.gather(torch.tensor(pages, device="cuda"), rows)
        assert rows.cpu().numpy().tobytes() == bytes(pool.export(pages))
        assert rows.any(), "pages that were never written say nothing"
        pool.scatter(torch.tensor(targets, device="cuda"), rows)
    assert pool.export(targets) == pool.export(pages)


def test_memory_brings_back_what_the_pool_forgot(case: Case) -> None:
    engine = case.engine(**MEMORY)
    assert engine.tiers is not None
    assert base.run(engine, requests()) == case.want
    settle(engine)
    assert pages_are_kept(engine) > 20 and engine.tiers.counts.drops == 0
    for _ in range(2):
        engine.core.scheduler.kv.flush()
        before = engine.tiers.counts.loads_memory
        again = requests()
        assert base.run(engine, again) == case.want
        settle(engine)
        assert engine.tiers.counts.loads_memory - before > 20
        assert pages_are_kept(engine) > 20
        assert sum(request.num_cached for request in again) > 1000
    device = engine.tiers.device
    assert device is not None and device.strip.num_free == len(device.strip.rows)
    engine.tiers.close()


def test_restarts_remember(case: Case, tmp_path: Path) -> None:
    """... and a byte that was flipped in between is computed again."""
    for round in range(3):
        engine = case.engine(kv_disk=str(tmp_path))
        assert engine.tiers is not None
        again = requests()
        assert base.run(engine, again) == case.want
        settle(engine)
        assert engine.tiers.memory.num_bytes == 0, "kept for nobody"
        if round:
            assert engine.tiers.counts.loads_disk > 10
            assert (engine.tiers.counts.bad > 0) == (round == 2)
        engine.tiers.close()
        if round == 1:
            flip(next(tmp_path.glob("*.pages")))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for at in range(2000, len(content), len(content) // 7):
        content[at] ^= 4
    path.write_bytes(content)


def test_preemption_parks(case: Case) -> None:
    """A pool for few: pages are given away while they are copied out, and come back."""
    pool = case.plain.runner.pool
    num_pages = PageNeeds(16, pool.groups.windows, max_inflight=128).of(400) + 21
    shape = {"max_model_len": 400, "max_num_batched_tokens": 64}
    engine = case.engine(kv_cache_memory=num_pages * pool.page_bytes, **MEMORY, **shape)
    assert base.run(engine, requests()) == case.want
    stats = engine.core.scheduler.stats()
    assert stats.num_preempted > 0 and stats.pages_evicted > 0, "the pool was meant to be small"
    settle(engine)
    assert engine.tiers is not None and engine.tiers.counts.loads_memory > 10
    pages_are_kept(engine)
    engine.tiers.close()


def test_eager_steps_load_as_graphs_do(floats: Case) -> None:
    engine = floats.engine(enforce_eager=True, **MEMORY)
    for _ in range(2):
        assert base.run(engine, requests()) == floats.want
        engine.core.scheduler.kv.flush()
    assert engine.tiers is not None and engine.tiers.counts.loads_memory > 20
    engine.tiers.close()


def test_no_step_waits_for_a_save(floats: Case) -> None:
    """Copies that are held up on the device: steps go on, and all that is saved is right."""
    engine = floats.engine(**MEMORY)
    base.run(engine, requests())
    engine.core.scheduler.kv.flush()
    settle(engine)
    lanes = engine.runner.transfer._lanes
    prompts = base.prompts(8, seed=77)
    asked = [base.make(i, p, 40) for i, p in enumerate(prompts)]
    # Others of the same lengths: a graph that is captured first waits for the whole device.
    others = [[3 + token % 500 for token in prompt] for prompt in prompts]
    begun = time.perf_counter()
    base.run(engine, [base.make(100 + i, p, 40) for i, p in enumerate(others)])
    alone = time.perf_counter() - begun

    def hold_up() -> Landing:
        for _ in range(max(2, min(12, int(4 * alone)))):  # others may slow the steps down
            lanes.saving.do(lambda: torch.cuda._sleep(FAST))
        return lanes.saving.mark()

    hold_up()  # the host's allocator has to have what many copies under way need
    last = [[3 + token % 499 for token in prompt] for prompt in prompts]
    base.run(engine, [base.make(200 + i, p, 40) for i, p in enumerate(last)])
    settle(engine)
    held = hold_up()
    base.run(engine, asked)
    assert not held.is_over(), "a step has waited for the copies"
    settle(engine)
    assert held.is_over() and pages_are_kept(engine) > 20
    plain = [base.make(i, p, 40) for i, p in enumerate(prompts)]
    assert [one.output for one in asked] == base.run(floats.plain, plain)
    engine.tiers.close()


def test_a_cpu_and_a_gpu_find_nothing_of_each_other(floats: Case, tmp_path: Path) -> None:
    engine = floats.engine(kv_disk=str(tmp_path), dtype="float32")
    assert engine.tiers is not None
    base.run(engine, requests()[:2])
    settle(engine)
    engine.tiers.close()
    cpu = hf.tiny_engine(floats.model, page_size=16, kv_disk=str(tmp_path), max_model_len=512)
    assert cpu.tiers is not None and cpu.tiers.disk is not None
    assert len(cpu.tiers.disk) == 0 and cpu.tiers.disk.num_foreign == 1
    cpu.tiers.close()


def test_what_is_sooner_goes_by_what_was_measured(
    floats: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when steps are taken to be as quick as they are launched, or copies are not timed."""
    monkeypatch.undo()
    engine = floats.engine(**MEMORY)
    assert engine.tiers is not None
    tempo = engine.tiers.tempo
    assert tempo.costs is not None and 1e-4 < tempo.costs.seconds(512) < 1.0
    monkeypatch.setattr(Tempo, "is_worth", lambda *args: True)
    for _ in range(2):
        assert base.run(engine, requests()) == floats.want
        engine.core.scheduler.kv.flush()
    assert 1e-12 < tempo.seconds_per_lifted < 1e-5
    monkeypatch.undo()
    tempo.seconds_per_lifted = 1.0
    before = engine.tiers.counts.loads_memory
    assert base.run(engine, requests()) == floats.want
    assert engine.tiers.counts.loads_memory == before and engine.tiers.counts.recomputed > 0
    engine.tiers.close()


# ------------------------------------------------------------ two engines


def test_apart_in_one_process(case: Case, tmp_path: Path) -> None:
    """Where memory cannot be mapped, bytes are sent."""
    transport = "ipc" if case.name == "floats" else "sockets"
    common = {"kv_secret": str(tmp_path / "secret"), "kv_transport": transport}
    prefill = case.engine(kv_role="prefill", kv_listen="127.0.0.1:0", **common)
    assert prefill.tiers is not None and isinstance(prefill.tiers.remote, SocketConnector)
    peers = (prefill.tiers.remote.address,)
    decode = case.engine(kv_role="decode", kv_peers=peers, **common)
    asked = requests()
    for request in asked:
        request.kv_source = compute(prefill, request)
    assert base.run(decode, asked) == case.want
    assert decode.tiers is not None and decode.tiers.counts.failed_pulls == 0
    assert decode.tiers.counts.loads_remote > 20
    assert len(prefill.tiers.remote.leases) == 0
    for engine in (prefill, decode):
        settle(engine)
        engine.tiers.close()


@contextmanager
def lending(secret: Path, transport: str) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "tests.gpu.lending_engine", "llama", str(secret), transport]
    child = subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def word_of(child: subprocess.Popen[str], name: str) -> str:
    assert child.stdout is not None
    line = "-"
    while not line.startswith(name + " "):
        line = child.stdout.readline()
        assert line, "the engine that lends has ended"
    return line.split()[1]


def ticket_of(child: subprocess.Popen[str], prompt: list[int]) -> str:
    assert child.stdin is not None
    child.stdin.write(json.dumps(prompt) + "\n")
    child.stdin.flush()
    return word_of(child, "ticket")


def test_apart_in_two_processes(floats: Case, tmp_path: Path) -> None:
    """Pages cross inside the GPU; a lender that dies costs a computation and no token."""
    secret = tmp_path / "secret"
    with lending(secret, "ipc") as child:
        peers = (word_of(child, "ready"),)
        common = {"kv_secret": str(secret), "kv_transport": "ipc"}
        decode = floats.engine(kv_role="decode", kv_peers=peers, **common)
        assert decode.tiers is not None and isinstance(decode.tiers.remote, SocketConnector)
        counts, mover = decode.tiers.counts, decode.tiers.remote._mover
        # Those of less than a page have no ticket.
        asked = [one for one in requests() if one.num_prompt > 16]
        want = [floats.want[one.id] for one in asked]
        for request in asked:
            request.kv_source = ticket_of(child, request.tokens.tolist())
        assert base.run(decode, asked) == want
        assert counts.failed_pulls == 0 and counts.loads_remote > 20
        assert isinstance(mover, IpcMover) and len(mover._mapped) == 1, "nothing was mapped"
        decode.core.scheduler.kv.flush()
        late = [base.make(100 + i, p, 20) for i, p in enumerate(base.prompts(4, seed=5, low=40))]
        for request in late:
            request.kv_source = ticket_of(child, request.tokens.tolist())
    alone = [base.make(100 + i, p, 20) for i, p in enumerate(base.prompts(4, seed=5, low=40))]
    assert base.run(decode, late) == base.run(floats.plain, alone)
    assert counts.failed_pulls == len(late)
    settle(decode)
    strip = decode.tiers.device.strip
    assert strip.num_free == len(strip.rows)
    decode.tiers.close()
