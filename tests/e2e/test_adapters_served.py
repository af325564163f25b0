"""Adapters on a real server: named as models, loaded and unloaded by hand, there after a crash."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.harness import Served, wait_until
from tests.engine.tiny import random_llama, save_tiny_folder
from tests.hf import greedy
from tests.lora.cases import merged, write_adapter

PROMPT = "once upon a time"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    model = random_llama(max_position_embeddings=1024)
    save_tiny_folder(folder / "model", model)
    for seed, name in enumerate(("one", "two"), 1):
        write_adapter(folder / name, model, seed=seed)
    return folder


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[Served]:
    flags = ("--device", "cpu", "--dtype", "float32", "--lora", f"one={place / 'one'}")
    with Served(place / "model", *flags, "--api-processes", "2") as made:
        yield made
        made.wait_idle()


def tokens(served: Served, model: str) -> list[int]:
    asked = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    status, body = served.complete(PROMPT, model=model, **asked)
    assert status == 200, body
    found: list[int] = body["choices"][0]["token_ids"]
    return found


def names(served: Served) -> list[str]:
    return [model["id"] for model in served.get("/v1/models")[1]["data"]]


def test_adapters_come_go_and_come_back(served: Served, place: Path) -> None:
    """Red when an adapter answers as another, is cut off by its unloading, or a crash loses it."""
    base = random_llama(max_position_embeddings=1024)
    ids = served.complete(PROMPT, return_token_ids=True)[1]["choices"][0]["prompt_token_ids"]
    want = {name: greedy(merged(base, place / name), ids, 8) for name in ("one", "two")}
    assert names(served) == ["tiny", "one"]
    assert tokens(served, "one") == want["one"]
    assert tokens(served, "tiny") == greedy(base, ids, 8)
    assert served.complete(PROMPT, model="two")[0] == 404

    load = {"lora_name": "two", "lora_path": str(place / "two")}
    status, said = served.post("/v1/load_lora_adapter", load)
    assert (status, said) == (200, "Success: LoRA adapter 'two' added successfully.")
    for _ in range(4):  # whichever API process answers
        wait_until(lambda: names(served) == ["tiny", "one", "two"], 5, "both processes know")
        assert tokens(served, "two") == want["two"]
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="any")
    assert client.models.retrieve("two").id == "two"

    def pieces() -> Iterator[str]:
        fields: Any = {"temperature": 0, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
        for chunk in client.completions.create(model="two", prompt=PROMPT, stream=True, **fields):
            yield chunk.choices[0].text

    whole, stream = "".join(pieces()), pieces()
    begun = next(stream)
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "two"})[0] == 200
    assert begun + "".join(stream) == whole  # it kept the weights to its end
    wait_until(lambda: served.complete(PROMPT, model="two")[0] == 404, 5, "the name is gone")

    assert served.post("/v1/load_lora_adapter", load)[0] == 200
    served.engine.send_signal(signal.SIGKILL)
    wait_until(lambda: not served.is_ready(), 20, "the engine is gone")
    wait_until(served.is_ready, 60, "the engine is back")
    assert tokens(served, "two") == want["two"]
    assert served.post("/v1/load_lora_adapter", {**load, "lora_path": "/no"})[0] == 400
