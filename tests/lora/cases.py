"""PEFT folders for tiny models, and what they must do: the model with W + scale * B A merged in."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from quire.engine.build import Engine
from quire.params import SamplingParams
from quire.request import Request
from quire.step import TokenLogprobs

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def modules(model: Any, targets: Iterable[str]) -> dict[str, tuple[int, int]]:
    """(out, in) of each module whose name ends in one of these."""
    found = {}
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in targets and hasattr(module, "weight"):
            shape = tuple(module.weight.shape)
            found[name] = shape[::-1] if type(module).__name__ == "Conv1D" else shape
    return found


def write_adapter(
    folder: Path,
    model: Any,
    targets: Sequence[str] = ALL,
    rank: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Large enough that answers differ clearly from the model's own."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (num_out, num_in) in modules(model, targets).items():
        for half, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
            made = 0.2 * torch.randn(shape, generator=numbers)
            tensors[f"{PREFIX}{name}.lora_{half}.weight"] = made.to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    plain = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(plain | config))
    return folder


@torch.no_grad()
def merged(model: Any, folder: Path) -> Any:
    """A copy of the model with the adapter in its weights, by nothing but torch."""
    made = copy.deepcopy(model)
    config = json.loads((folder / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in modules(made, config["target_modules"]):
        low = tensors[f"{PREFIX}{name}.lora_A.weight"].float()
        high = tensors[f"{PREFIX}{name}.lora_B.weight"].float()
        module = made.get_submodule(name)
        added = scale * high @ low
        module.weight += added.t() if type(module).__name__ == "Conv1D" else added
    return made


def ask(id: int, prompt: Sequence[int], adapter: str, **params: Any) -> Request:
    wish = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "logprobs": 2, **params}
    request = Request.new(id, prompt, SamplingParams(**wish), seed=7 + id, arrival=float(id))
    request.adapter_name = adapter
    return request


Answers = dict[int, tuple[list[int], list[TokenLogprobs]]]


def run(engine: Engine, requests: Sequence[Request]) -> Answers:
    """Tokens and logprobs of each, to the bit."""
    logprobs: dict[int, list[TokenLogprobs]] = {request.id: [] for request in requests}
    for request in requests:
        engine.core.add(request)
    while engine.core.has_work:
        for event in engine.core.step():
            assert event.error is None, event.error
            logprobs[event.request_id] += event.logprobs
    assert engine.core.scheduler.kv.allocator.num_live == 0
    return {request.id: (request.output, logprobs[request.id]) for request in requests}
