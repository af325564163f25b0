"""Folders that are damaged, of another model, or of a kind not done: named, and nothing is run."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.build import Engine
from quire.errors import BadRequest, CheckpointError, NotSupported, QuireError
from quire.lora.folder import MAX_RANK, REFUSED, read_adapter
from quire.lora.request import LoRARequest, each_adapter
from tests.hf import tiny_engine, tiny_model
from tests.lora.cases import ALL, PREFIX, ask, run, write_adapter

FIRST = "model.layers.0.self_attn.q_proj"


@cache
def model() -> Any:
    return tiny_model("llama-packable")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(model())


def load(engine: Engine, folder: Path, name: str = "x") -> None:
    assert engine.core.adapters is not None
    engine.core.adapters.load(name, str(folder))


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    """Tensors by the end of their name; None takes one away."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for end, tensor in changes.items():
        name = f"{PREFIX}{FIRST}.{end.replace('__', '.')}"
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


BROKEN: dict[str, tuple[dict[str, torch.Tensor | None], type[QuireError], str]] = {
    "not a number": (
        {"lora_A__weight": torch.full((4, 64), float("nan"))},
        CheckpointError,
        "q_proj.lora_A.weight holds NaN",
    ),
    "ranks differ": (
        {"lora_B__weight": torch.ones(64, 5)},
        CheckpointError,
        r"A of rank 4 and B of rank 5, but adapter_config.json says 4",
    ),
    "half is missing": ({"lora_B__weight": None}, CheckpointError, r"lora_B.weight is missing"),
    "another model's": (
        {"lora_A__weight": torch.ones(4, 32)},
        CheckpointError,
        "a weight of 64 x 32, this model's is 64 x 64",
    ),
    "no matrix": ({"lora_A__weight": torch.ones(64)}, CheckpointError, "want a matrix of floats"),
    "whole numbers": (
        {"lora_A__weight": torch.ones(4, 64, dtype=torch.int8)},
        CheckpointError,
        "want a matrix of floats",
    ),
    "dora": (
        {"lora_magnitude_vector__weight": torch.ones(64)},
        NotSupported,
        "lora_magnitude_vector.*DoRA is not done",
    ),
    "a bias": ({"lora_B__bias": torch.ones(64)}, NotSupported, "lora_B.bias.*nothing here adds"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_tensors(case: str, engine: Engine, tmp_path: Path) -> None:
    changes, error, message = BROKEN[case]
    folder = write_adapter(tmp_path / "x", model())
    change(folder, **changes)
    with pytest.raises(error, match=message):
        load(engine, folder)
    assert engine.core.adapters is not None and engine.core.adapters.entries() == []


@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        (("lm_head",), NotSupported, "lm_head: embeddings and heads are not adapted"),
        (("embed_tokens",), NotSupported, "embed_tokens: embeddings and heads are not adapted"),
    ],
)
def test_modules_not_done(
    targets: tuple[str, ...], error: type[QuireError], message: str, engine: Engine, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        load(engine, write_adapter(tmp_path / "x", model(), targets))


def test_modules_of_another_family(engine: Engine, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "x", tiny_model("gpt2-16"), ("c_attn",))
    with pytest.raises(CheckpointError, match=r"llama has no module transformer\.h\.0"):
        load(engine, folder)


def test_experts_are_refused(tmp_path: Path) -> None:
    """Experts that a checkpoint holds one by one; those held in one tensor are no modules."""
    sparse = tiny_model("qwen3-moe")
    folder = write_adapter(tmp_path / "x", sparse, ("q_proj",))
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for half, shape in (("A", (4, 48)), ("B", (32, 4))):
        name = f"model.layers.0.mlp.experts.1.gate_proj.lora_{half}.weight"
        tensors[PREFIX + name] = torch.ones(shape)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(NotSupported, match="experts and routers are not adapted"):
        load(tiny_engine(sparse), folder)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        *(({name: True}, NotSupported, f"got {name}=True") for name in REFUSED),
        ({"bias": "lora_only"}, NotSupported, "bias='lora_only'"),
        ({"peft_type": "IA3"}, NotSupported, "peft_type='IA3'"),
        ({"init_lora_weights": "pissa_niter_4"}, NotSupported, "changes the model's own weights"),
        ({"r": 0}, CheckpointError, "got r=0"),
        ({"r": 8}, CheckpointError, "A of rank 4 and B of rank 4, but adapter_config.json says 8"),
        ({"lora_alpha": "x"}, CheckpointError, "lora_alpha='x'"),
        ({"alpha_pattern": {"(a*)*b": 1}}, NotSupported, "without repetition"),
        ({"alpha_pattern": {"(": 1}}, CheckpointError, "bad pattern"),
        ({"rank_pattern": {"q_proj": -1}}, CheckpointError, "want it above 0"),
        ({"rank_pattern": [1]}, CheckpointError, "want an object"),
        ({"rank_pattern": {"q_proj": 0.5}}, CheckpointError, "q_proj.*0.5, want a whole number"),
        ({"rank_pattern": {"q_proj": 1e20}}, NotSupported, "the most is 1024; merge"),
        ({"rank_pattern": {"q_proj": 10**400}}, CheckpointError, "want a number"),
        ({"r": 10**400}, NotSupported, "rank 1000.*, the most is 1024"),
        ({"lora_alpha": 10**400}, CheckpointError, "lora_alpha=1000.*, want a number"),
        ({"lora_alpha": 1e300}, CheckpointError, r"lora_alpha=1e\+300, want a number"),
    ],
)
def test_configs(
    config: dict[str, object], error: type[QuireError], message: str, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "x", model(), ("q_proj",), **config)
    if "r" in config:
        said = json.loads((folder / "adapter_config.json").read_text()) | config
        (folder / "adapter_config.json").write_text(json.dumps(said))
    with pytest.raises(error, match=message):
        read_adapter(folder)


def test_no_folder_no_weights_no_pickle(tmp_path: Path) -> None:
    """Red when a pickled file is looked at, or a missing one is a traceback."""
    with pytest.raises(CheckpointError, match="there is no folder"):
        read_adapter(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json"):
        read_adapter(tmp_path)
    folder = write_adapter(tmp_path / "x", model(), ("q_proj",))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights"):
        read_adapter(folder)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_model\.safetensors"):
        read_adapter(folder)


def test_the_largest_rank(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "x", model(), ("q_proj",), rank=MAX_RANK + 1)
    with pytest.raises(NotSupported, match=f"rank {MAX_RANK + 1}, the most is {MAX_RANK}"):
        read_adapter(folder)


def test_the_digest_is_of_what_decides(tmp_path: Path) -> None:
    """Red when two adapters that answer differently could share cached pages."""
    made = {
        read_adapter(write_adapter(tmp_path / str(i), model(), ALL, **kind)).digest
        for i, kind in enumerate(({}, {"seed": 1}, {"lora_alpha": 9}, {"use_rslora": True}))
    }
    again = read_adapter(write_adapter(tmp_path / "again", model(), ALL)).digest
    assert len(made) == 4 and again in made


def test_the_digest_is_of_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a part of a large file is left out, or parts may change places."""
    monkeypatch.setattr("quire.lora.folder.HASHED_AT_ONCE", 1000)
    file = write_adapter(tmp_path / "x", model(), ALL) / "adapter_model.safetensors"
    whole = file.read_bytes()
    made = {read_adapter(file.parent).digest}
    rest = len(whole) // 1000 * 1000 - 4000
    for changed in (
        whole[:-1] + bytes([whole[-1] ^ 1]),
        whole[: rest + 3] + bytes([whole[rest + 3] ^ 1]) + whole[rest + 4 :],
        whole[:rest]
        + whole[rest + 1000 : rest + 2000]
        + whole[rest : rest + 1000]
        + whole[rest + 2000 :],
    ):
        file.write_bytes(changed)
        made.add(read_adapter(file.parent).digest)
    assert len(made) == 4


def test_a_bad_folder_leaves_the_engine_as_it_was(engine: Engine, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "x", model(), rank=6)
    load(engine, folder)
    before = run(engine, [ask(1, [5, 6, 7], "x")])
    with pytest.raises(BadRequest, match="unload that first"):
        load(engine, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError):
        load(engine, tmp_path / "elsewhere", "y")
    assert run(engine, [ask(1, [5, 6, 7], "x")]) == before
    with pytest.raises(BadRequest, match="there is no adapter 'y'; loaded: x"):
        engine.core.add(ask(2, [5], "y"))
    assert engine.core.adapters is not None
    engine.core.adapters.unload("x")


def test_requests_of_the_offline_api() -> None:
    one = LoRARequest("a", 1, "/a")
    assert each_adapter(one, 2) == [one, one] and each_adapter(None, 2) == [None, None]
    assert each_adapter([None, one], 2) == [None, one]
    for wrong, message in (([one], "1 lora_requests for 2"), ("a", "want LoRARequest")):
        with pytest.raises(BadRequest, match=message):
            each_adapter(wrong, 2)
    with pytest.raises(BadRequest, match="1 to 200 characters"):
        LoRARequest("")
