"""A request's bits depend on its adapter and its tokens alone.

Oracle: the same request alone in an engine with room for everything. Red when who else is in the
batch, a chunk, a preemption, a prefix hit or a draft reaches into an adapter's products.
"""

from __future__ import annotations

import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.build import Engine
from quire.native.library import find_library
from quire.native.tape import ADAPT
from quire.request import Request
from tests.hf import VOCAB, tiny_engine, tiny_model
from tests.lora.cases import ALL, Answers, ask, run, write_adapter

FAMILY = "llama-packable"
NAMES = ("", "small", "large", "some")
LONG = {"max_tokens": 20}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapters of several ranks and types, one for some modules only."""
    place = tmp_path_factory.mktemp("adapters")
    model = tiny_model(FAMILY)
    write_adapter(place / "small", model, ALL, rank=3, seed=1)
    write_adapter(place / "large", model, ALL, rank=24, seed=2, dtype=torch.bfloat16)
    write_adapter(place / "some", model, ("v_proj", "down_proj"), rank=5, seed=3)
    return {name: str(place / name) for name in NAMES if name}


@cache
def prompts() -> tuple[list[int], ...]:
    rng = random.Random(11)
    lengths = (1, 2, 9, 33, 50)
    return tuple([rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths)


def everyone(**params: Any) -> list[Request]:
    """Every adapter and none, with the same prompts, in turn."""
    asked = [(prompt, name) for prompt in prompts() for name in NAMES]
    return [ask(i, *pair, **LONG, **params) for i, pair in enumerate(asked)]


def engine_of(folders: dict[str, str], **changes: Any) -> Engine:
    return tiny_engine(tiny_model(FAMILY), lora=folders, **changes)


@pytest.fixture(scope="module")
def alone(folders: dict[str, str]) -> Answers:
    engine = engine_of(folders, enable_prefix_caching=False)
    found: Answers = {}
    for request in everyone():
        found |= run(engine, [request])
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "crowded": {"max_num_seqs": 20},
    "chunked": {"max_num_batched_tokens": 8, "max_chunk": 3},
    "preempted": {"kv_cache_memory": 70_000, "max_model_len": 80},
    "layer by layer": {"enforce_eager": True},
    "few in memory": {"max_loras": 1},
    "drafts": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}},
    "drafts by its own layers": {
        "speculative_config": {"method": "early_exit", "num_speculative_tokens": 2}
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_alone_is_crowded(setting: str, folders: dict[str, str], alone: Answers) -> None:
    changes = SETTINGS[setting]
    if setting == "few in memory":
        engine = engine_of({}, **changes)
        assert engine.core.adapters is not None
        for name, path in folders.items():
            engine.core.adapters.load(name, path)
    else:
        engine = engine_of(folders, **changes)
    requests = everyone()
    assert run(engine, requests) == alone
    if setting == "preempted":
        assert sum(request.num_preempted for request in requests) > 0


@pytest.mark.parametrize("changes", [{}, {"enforce_eager": True}])
def test_files_may_go_once_they_were_read(
    changes: dict[str, Any], folders: dict[str, str], alone: Answers, tmp_path: Path
) -> None:
    """Red when an adapter that made room is read again, or comes back as another."""
    engine = engine_of({}, max_loras=1, **changes)
    assert engine.core.adapters is not None
    for name, path in folders.items():
        shutil.copytree(path, tmp_path / name)
        engine.core.adapters.load(name, str(tmp_path / name))
        shutil.rmtree(tmp_path / name)
    for _ in range(2):
        assert run(engine, everyone()) == alone
        engine.core.scheduler.kv.flush()


def test_rows_without_an_adapter_are_the_models_own(alone: Answers) -> None:
    """Red when an engine with adapters gives other bits to those who use none."""
    engine = tiny_engine(tiny_model(FAMILY))
    plain = [request for request in everyone() if not request.adapter_name]
    assert run(engine, plain) == {request.id: alone[request.id] for request in plain}


@pytest.mark.parametrize("form", ["rtn-int4-g32", "int8", "nf4", "fp8"])
def test_packed_weights(form: str, folders: dict[str, str]) -> None:
    """Red when an adapter needs weights in floats, or rounds what it adds to."""
    engine = engine_of(folders, quantization=form, dtype="auto", max_num_seqs=20)
    together = run(engine, everyone())
    for request in everyone()[::3]:
        engine.core.scheduler.kv.flush()
        assert run(engine, [request])[request.id] == together[request.id]
    assert len({tuple(together[i][0]) for i in range(16, 20)}) == len(NAMES)


def test_prefixes_are_the_adapters_own(folders: dict[str, str], tmp_path: Path) -> None:
    """Red when a page of one adapter is found under another, or not under its own."""
    engine, prompt = engine_of(folders), prompts()[3]
    write_adapter(tmp_path / "twin", tiny_model(FAMILY), ALL, rank=3, seed=1)
    assert engine.core.adapters is not None
    engine.core.adapters.load("twin", str(tmp_path / "twin"))
    hits = []
    for number, name in enumerate(("small", "large", "", "small", "large", "", "twin")):
        request = ask(number, prompt, name)
        run(engine, [request])
        hits.append(request.num_cached)
    assert hits == [0, 0, 0, 32, 32, 32, 32]  # a twin has the same weights under another name


def test_salts_cannot_pose_as_adapters(folders: dict[str, str]) -> None:
    """Red when a client's salt can be written so that it meets an adapter's pages."""
    engine, prompt = engine_of(folders), prompts()[3]
    one = ask(1, prompt, "small")
    run(engine, [one])
    for salt in (one.adapter.digest.hex(), one.adapter.digest.decode("latin-1"), "small"):
        other = ask(2, prompt, "")
        other.cache_salt = salt
        run(engine, [other])
        assert other.num_cached == 0


def test_answers_of_one_prompt(folders: dict[str, str]) -> None:
    """Red when siblings (n > 1) lose the adapter, or keep it from leaving."""
    engine, prompt = engine_of(folders), prompts()[2]
    leader = ask(1, prompt, "large", temperature=1.0)
    leader.children = [ask(2, prompt, "large", temperature=1.0)]
    children = list(leader.children)
    engine.core.add(leader)
    while engine.core.has_work:
        engine.core.step()
    assert [r.output for r in children] == [
        run(engine, [ask(2, prompt, "large", temperature=1.0)])[2][0]
    ]
    assert engine.core.adapters is not None
    assert not any(entry.users for entry in engine.core.adapters.entries())


def test_every_instruction_set_and_thread(folders: dict[str, str], alone: Answers) -> None:
    """Red when what an adapter adds follows the width of a vector, or who computes it."""
    library = find_library().library
    if library is None:
        pytest.skip("no native library here")
    best = library.isa
    try:
        for isa, threads in ((best, 3), *((isa, 1) for isa in library.isas if isa != best)):
            library.use_isa(isa)
            engine = engine_of(folders, num_threads=threads, max_num_seqs=20)
            assert run(engine, everyone()) == alone
            assert engine.runner.tapes is not None and engine.runner.tapes._adapted
    finally:
        library.use_isa(best)
        library.set_threads(1)
        torch.set_num_threads(1)


def test_steps_without_adapters_are_as_ever(folders: dict[str, str]) -> None:
    """Red when the mere presence of adapters adds an operation to everybody's steps."""
    plain, adapted = tiny_engine(tiny_model(FAMILY)), engine_of(folders)
    run(adapted, [request for request in everyone() if not request.adapter_name])
    for engine in (plain, adapted):
        assert engine.runner.tapes is not None and not engine.runner.tapes._adapted
    kinds = [
        [
            [op.kind for op in tapes.tape.ops]
            for tapes in (e.runner.tapes.whole, e.runner.tapes.tail)
        ]
        for e in (plain, adapted)
        if e.runner.tapes is not None
    ]
    assert kinds[0] == kinds[1] and ADAPT not in kinds[0][0]
