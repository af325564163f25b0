"""Several models on a real server: each its own engine, one's end not another's."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import Served, wait_until
from tests.engine.tiny import random_llama, save_tiny_folder
from tests.hf import greedy


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for number, name in enumerate(("one", "two"), 2):
        save_tiny_folder(folder / name, random_llama(num_hidden_layers=number))
    (folder / "broken").mkdir()
    for path in (folder / "one").glob("*.json"):
        (folder / "broken" / path.name).write_bytes(path.read_bytes())
    lines = [f'[models.one]\nmodel = "{folder / "one"}"']
    lines += [f'[models.two]\nmodel = "{folder / "two"}"\nat_start = false']
    lines += [f'[models.broken]\nmodel = "{folder / "broken"}"']
    lines += ['[auto]\nsmall = "one"\nlarge = "two"', "[auto.cascade]\nmean_logprob = 0.0"]
    lines += ['[[auto.rules]]\nmodel = "one"\nmax_chars = 4']
    (folder / "models.toml").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[Served]:
    with Served(place / "models.toml", "--device", "cpu", "--dtype", "float32") as made:
        yield made


def states(served: Served) -> dict[str, str]:
    listed = served.get("/v1/models")[1]["data"]
    return {model["id"]: model["state"] for model in listed if model["id"] != "auto"}


def tokens(served: Served, model: str) -> tuple[list[int], list[int]]:
    asked = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    status, body = served.complete("once upon", model=model, **asked)
    assert status == 200, body
    choice = body["choices"][0]
    return choice["prompt_token_ids"], choice["token_ids"]


def engine_of(served: Served, name: str) -> psutil.Process:
    """Engines are told apart by the socket they listen on."""
    number = list(states(served)).index(name)
    for child in psutil.Process(served.process.pid).children():
        if any(f"model-{number}/" in str(c.laddr) for c in child.net_connections("unix")):
            return child
    raise AssertionError(f"no engine of {name}")


def check_auto(served: Served, models: dict[str, Any]) -> None:
    """An answer that is held back and judged is the one its model gives."""
    asked = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    for text, name in (("once upon", "two"), ("once", "one")):  # escalated; by the rule
        status, body = served.complete(text, model="auto", **asked)
        assert (status, body["model"]) == (200, name), body
        choice = body["choices"][0]
        assert choice["token_ids"] == greedy(models[name], choice["prompt_token_ids"], 6)
        assert choice["logprobs"] is None


def test_models_come_and_go(served: Served) -> None:
    """Red when a request is another model's, or one model's end reaches the others."""
    assert states(served) == {"one": "ready", "two": "unloaded", "broken": "failed"}
    models: dict[str, Any] = {"one": random_llama(), "two": random_llama(num_hidden_layers=3)}
    for name, model in models.items():  # the second is loaded by this request
        prompt, found = tokens(served, name)
        assert found == greedy(model, prompt, 6)
    assert states(served)["two"] == "ready"
    check_auto(served, models)
    status, body = served.complete("hi", model="broken")
    assert status == 503 and "no model.safetensors" in body["error"]["message"]

    engine_of(served, "two").send_signal(signal.SIGKILL)
    wait_until(lambda: states(served)["two"] == "loading", 10, "its end is seen")
    assert tokens(served, "one")[1]  # never noticed
    assert tokens(served, "two")[1]  # waits for its engine's return

    assert served.post("/admin/models/park", {"model": "two"})[0] == 200
    wait_until(lambda: states(served)["two"] == "parked", 30, "parked")
    prompt, found = tokens(served, "two")
    assert found == greedy(models["two"], prompt, 6)
    assert served.post("/admin/models/unload", {"model": "one"})[0] == 200
    wait_until(lambda: states(served)["one"] == "unloaded", 30, "unloaded")
    assert served.stop() == 0
