"""An engine with tiers outside its pool says what the same engine says without them.

Oracle: the same requests in an engine that keeps nothing, token by token and float by float. Turns
red when a page comes back from memory or disk without its scales, its window or a layer group, in
another model's engine, or at another request's place.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.engine.build import Engine
from quire.errors import NotSupported
from quire.kv.groups import PageNeeds
from quire.params import SamplingParams
from quire.request import Request
from quire.step import TokenLogprobs
from quire.tiers.tempo import Tempo
from tests.engine.tiny import random_llama
from tests.hf import VOCAB, tiny_engine, tiny_model
from tests.model.test_deepseek import model_of
from tests.tiers.nodes import data_of, node, open_shelf

PARAMS = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=2)
CODED = {"page_size": 4, "kv_cache_dtype_skip_layers": (0,)}
PACKED = {"dtype": "auto", "quantization": "rtn-int4-g32"}
# family -> arguments of its engine
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "floats": ("llama-gqa", {}),
    "pages of 1": ("llama-gqa", {"page_size": 1}),
    "packed weights": ("llama-packable", PACKED),
    "full and windowed": ("gemma3", {}),
    "windowed alone": ("mistral-window", {"page_size": 2}),
    "int8 and floats": ("llama-32", {"kv_cache_dtype": "int8", **CODED}),
    "int4": ("llama-32", {"kv_cache_dtype": "int4"}),
    "latents": ("v2-lite", {}),
    "latents in fp8": ("v2-lite", {"kv_cache_dtype": "fp8"}),
}


@pytest.fixture(autouse=True)
def always_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models compute faster than any disk."""
    monkeypatch.setattr(Tempo, "is_worth", lambda *args: True)


@cache
def model(family: str) -> Any:
    if family == "llama-32":  # heads that the native library keeps in every form
        return random_llama(head_dim=32, vocab_size=VOCAB)
    return model_of("v2-lite") if family == "v2-lite" else tiny_model(family)


def engine_of(case: str, **changes: Any) -> Engine:
    family, args = CASES[case]
    return tiny_engine(model(family), **{"max_model_len": 96, **args, **changes})


def requests(salt: str = "") -> list[Request]:
    """Prompts that share much, little and nothing, one of them a whole number of pages."""
    rng = random.Random(7)
    base = [rng.randrange(3, VOCAB) for _ in range(48)]
    own = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (3, 33, 60)]
    prompts = [*own, base, base[:32], base + own[0]]
    wishes = (PARAMS, PARAMS.with_(temperature=0.0))
    return [
        Request.new(i, prompt, wishes[i % 2], seed=50 + i, cache_salt=salt)
        for i, prompt in enumerate(prompts)
    ]


def records(engine: Engine, asked: Sequence[Request]) -> dict[int, list[TokenLogprobs]]:
    found: dict[int, list[TokenLogprobs]] = {request.id: [] for request in asked}
    for request in asked:
        engine.core.add(request)
    while engine.core.has_work:
        for event in engine.core.step():
            found[event.request_id] += event.logprobs
    assert engine.core.scheduler.kv.allocator.num_live == 0
    return found


@cache
def alone(case: str) -> dict[int, list[TokenLogprobs]]:
    engine = engine_of(case, enable_prefix_caching=False, max_num_seqs=1)
    return {i: found for one in requests() for i, found in records(engine, [one]).items()}


def opened(folder: Path, case: str = "floats", **changes: Any) -> Iterator[Engine]:
    engine = engine_of(case, kv_disk=str(folder), **changes)
    yield engine
    assert engine.tiers is not None and engine.tiers.flush(5.0)
    assert engine.tiers.memory.num_bytes <= engine.tiers.memory.limit, "kept for nobody"
    engine.tiers.close()


@pytest.mark.parametrize("case", CASES)
def test_restarts_remember(case: str, tmp_path: Path) -> None:
    for engine in opened(tmp_path, case):
        assert records(engine, requests()) == alone(case)
    for engine in opened(tmp_path, case):
        again = requests()
        assert records(engine, again) == alone(case)
        assert engine.tiers.counts.loads_disk > 10 and not engine.tiers.counts.bad
        size = engine.core.scheduler.kv.page_size
        for request in again:
            whole = request.num_prompt // size * size
            assert request.num_cached == min(whole, request.num_prompt - 1)


@pytest.mark.parametrize("case", ["floats", "full and windowed", "int4"])
def test_preemption_parks(case: str) -> None:
    """Many that grow in a pool for few. What leaves it comes back from memory, where the same
    engine without that memory computes it again."""
    rng = random.Random(11)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(20)] for _ in range(8)]
    shape = {"max_model_len": 64, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    kv = engine_of(case, **shape).core.scheduler.kv
    num_pages = PageNeeds(kv.page_size, kv.windows, 16).of(64) + 10
    page_bytes = engine_of(case, **shape).runner.pool.page_bytes
    lost, found = {}, {}
    for memory in (None, 1 << 24):
        engine = engine_of(
            case, kv_host_memory=memory, kv_cache_memory=num_pages * page_bytes, **shape
        )
        wish = PARAMS.with_(max_tokens=40)
        asked = [Request.new(i, prompt, wish, seed=i) for i, prompt in enumerate(prompts)]
        found[memory] = records(engine, asked)
        stats = engine.core.scheduler.stats()
        assert stats.num_preempted > 5, stats
        lost[memory] = stats.num_recomputed_tokens
    assert engine.tiers is not None and engine.tiers.counts.loads_memory > 10
    assert found[None] == found[1 << 24]
    # The rest of a page that was not full is computed again.
    assert lost[1 << 24] <= 0.3 * lost[None], lost


def test_salts_are_part_of_the_key(tmp_path: Path) -> None:
    """Red when one tenant's pages can be found by another after a restart."""
    for engine in opened(tmp_path):
        records(engine, requests("one"))
    for engine in opened(tmp_path):
        other = requests("two")
        assert records(engine, other) == alone("floats")
        assert engine.tiers.counts.loads_disk == 0
        assert records(engine, requests("one")) == alone("floats")
        assert engine.tiers.counts.loads_disk > 0


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 8},
        {"enforce_eager": True, "attention_backend": "reference"},
        {"kv_cache_dtype": "int8"},
    ],
    ids=str,
)
def test_other_layouts_find_nothing(change: dict[str, Any], tmp_path: Path) -> None:
    """Red when the fingerprint forgets something that decides a page's bytes."""
    for engine in opened(tmp_path):
        records(engine, requests())
    for engine in opened(tmp_path, **change):
        assert len(engine.tiers.disk) == 0 and engine.tiers.disk.num_foreign == 1
        records(engine, requests())
        assert engine.tiers.counts.loads_disk == 0


def test_other_weights_find_nothing(tmp_path: Path) -> None:
    for engine in opened(tmp_path):
        records(engine, requests())
    other = tiny_engine(tiny_model("llama-gqa", seed=1), max_model_len=96, kv_disk=str(tmp_path))
    assert other.tiers is not None and len(other.tiers.disk) == 0
    assert other.tiers.disk.num_foreign == 1
    other.tiers.close()


def test_damaged_pages_are_computed_again(tmp_path: Path) -> None:
    """Every byte of every record may be flipped: other tokens never come of it."""
    rng = random.Random(5)
    for round in range(4):
        for engine in opened(tmp_path):
            assert records(engine, requests()) == alone("floats")
            if round:
                assert engine.tiers.counts.bad or len(engine.tiers.disk) < 60
        for path in tmp_path.glob("*.pages"):
            content = bytearray(path.read_bytes())
            for _ in range(len(content) // 2000):
                content[rng.randrange(64, len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)


def test_an_engine_goes_on_without_its_disk(tmp_path: Path) -> None:
    """In use by another, not a folder, a secret that others can read: said, and no obstacle."""
    (tmp_path / "file").write_text("")
    (tmp_path / "taken").mkdir()
    taken = open_shelf(tmp_path / "taken")
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "secret").write_bytes(b"x" * 32)
    (tmp_path / "open" / "secret").chmod(0o644)
    words = {"file": "File exists", "taken": "in use by process", "open": "chmod 600"}
    for name, word in words.items():
        engine = engine_of("floats", kv_disk=str(tmp_path / name))
        said = [d for d in engine.decisions if d.what == "kv disk"]
        assert said[0].value == "off" and word in said[0].why
        assert engine.tiers is None and records(engine, requests()) == alone("floats")
    taken.write(node(1), data_of(1))
    taken.close()


def test_a_full_disk_costs_nothing_but_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in opened(tmp_path):
        disk = engine.tiers.disk
        monkeypatch.setattr(disk, "_begin_segment", full_disk)
        assert records(engine, requests()) == alone("floats")
        assert engine.tiers.flush(5.0)
        assert engine.tiers.counts.drops > 10 and disk.is_paused


def full_disk() -> None:
    raise OSError(28, "No space left on device")


def test_what_cannot_be_is_refused() -> None:
    for args, word in (
        ({"kv_disk": "x", "enable_prefix_caching": False}, "found by their prefix"),
        ({"kv_disk_size": 1 << 30}, "which folder"),
        ({"kv_disk": "x", "kv_disk_size": 5}, "kv_disk_size=5"),
        ({"kv_host_memory": -1}, "kv_host_memory=-1"),
        ({"kv_role": "prefill", "tensor_parallel_size": 2}, "use one rank"),
    ):
        with pytest.raises(NotSupported, match=word):
            engine_of("floats", **args)
