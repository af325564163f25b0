"""A conversation goes on after a restart: through `LLM`, and through a server that was killed."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.llm import LLM
from quire.lora.request import LoRARequest
from quire.params import SamplingParams
from tests.e2e.harness import Served, wait_until
from tests.engine.tiny import random_llama
from tests.hf import greedy
from tests.lora.cases import merged, write_adapter

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))
LONG_ONLY = pytest.mark.skipif(not IS_LONG, reason="set QUIRE_LONG_TESTS=1")
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, logprobs=1, ignore_eos=True)
FIRST = [{"role": "user", "content": "Tell me of the quire, please."}]


def conversation(llm: LLM) -> tuple[list[Any], int]:
    """Two turns; what was said in the second, and how much of its prompt was cached."""
    said = llm.chat(FIRST, PARAMS, use_tqdm=False)[0].outputs[0].text
    more = [*FIRST, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    found = llm.chat(more, PARAMS, use_tqdm=False)[0]
    return [found.outputs[0].token_ids, found.outputs[0].logprobs], found.num_cached_tokens or 0


@pytest.mark.parametrize("weights", ["float32"], indirect=True)
def test_llm_goes_on_from_disk(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Red when a dropped LLM leaves its folder locked, its pages unwritten or its keys unknown."""
    want, _ = conversation(make_llm())
    llm = make_llm(kv_disk=str(tmp_path))
    assert conversation(llm)[0] == want
    del llm
    gc.collect()  # its folder is free again, and all that was saved is there
    llm = make_llm(kv_disk=str(tmp_path))
    found, num_cached = conversation(llm)
    assert found == want and num_cached > 40
    assert llm._engine.tiers is not None and llm._engine.tiers.counts.loads_disk > 5


@pytest.mark.parametrize("weights", ["float32"], indirect=True)
def test_adapters_find_their_own_pages(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Red when pages that an adapter computed are found by another, or by none after a restart."""
    base = random_llama()
    folders = [write_adapter(tmp_path / name, base, seed=i) for i, name in enumerate("ab")]
    text = "What a quire is, and what it was, in many words."
    greedy_params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    ones = [None, *(LoRARequest(f.name, i + 1, str(f)) for i, f in enumerate(folders))]
    models = [base, *(merged(base, folder) for folder in folders)]
    for order in ([0, 1, 2], [2, 0, 1]):
        llm = make_llm(
            enable_lora=True, max_loras=2, max_lora_rank=16, kv_disk=str(tmp_path / "kv")
        )
        ids = llm.get_tokenizer().encode(text)
        for which in order:
            found = llm.generate(text, greedy_params, False, ones[which])[0]
            assert list(found.outputs[0].token_ids) == greedy(models[which], ids, 8)
            is_first = order == [0, 1, 2]
            assert (found.num_cached_tokens or 0) == (0 if is_first else len(ids) // 4 * 4)
        assert llm._engine.tiers is not None
        llm._engine.tiers.close()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=LONG_ONLY)])
def test_served_engine_goes_on_from_disk(ranks: int, tiny_folder: Path, tmp_path: Path) -> None:
    """Its engine is killed, the server started anew: each time the prefix is still there."""
    flags = ["--device", "cpu", "--page-size", "4", "--kv-disk", str(tmp_path), "--no-page"]
    flags += ["--tensor-parallel-size", str(ranks)]
    flags += ["--generation-config", "none", "--dtype", "float32"]
    body = {
        "model": "tiny",
        "prompt": "What a quire is, and what it was, in many words: " * 3,
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": 1,
    }

    def ask(server: Served) -> tuple[Any, int]:
        status, answer = server.post("/v1/completions", body)
        assert status == 200, answer
        choice = answer["choices"][0]
        return choice["logprobs"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with Served(tiny_folder, *flags) as server:
        want, num_cached = ask(server)
        assert num_cached == 0
        assert 'quire:kv_tier_bytes{tier="disk"}' in server.get("/metrics")[1]
        pid = server.engine.pid
        server.engine.kill()
        wait_until(lambda: not server.is_ready(), 10, "the engine is gone")
        wait_until(server.is_ready, 60, "the engine is back")
        assert server.engine.pid != pid
        found, num_cached = ask(server)
        assert found == want and num_cached > 100
    if IS_LONG:
        with Served(tiny_folder, *flags) as server:
            found, num_cached = ask(server)
            assert found == want and num_cached > 100
