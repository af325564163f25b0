"""Decode steps with adapters, random weights: what each kind of company costs, and a hot load.

    python -m benchmarks.gpu_lora                        # 8b, rank 16, all linear layers
    python -m benchmarks.gpu_lora --targets attention --rank 64
    python -m benchmarks.gpu_lora --rehearse             # a tiny model, for any machine

Prints one JSON line. `steps`: milliseconds from step to step as the host sees them, by batch: with
no adapter loaded, with all loaded and none used, with one for all rows, and with as many as there
are rows (`mixed_32`, `mixed_64`: out of so many). `prompt`: milliseconds of a prompt until its
first token. `load`: milliseconds to read a folder and have it on the device; the first load
compiles kernels. One folder is loaded under every name, so each has memory of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.bench.shapes import SHAPES, shrunk
from quire.bench.workload import random_tokens
from quire.request import Request

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
TARGETS = {"all": ALL, "attention": ATTENTION}
NUM_ADAPTERS = 64
MIXES = (32, 64)


def write_adapter(
    folder: Path, config: Mapping[str, Any], targets: Sequence[str], rank: int
) -> int:
    """Returns the bytes of its weights."""
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    outs = {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": ffn, "up_proj": ffn}
    ins = {"o_proj": q, "down_proj": ffn}
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name in targets:
            block = "self_attn" if name in ATTENTION else "mlp"
            module = f"base_model.model.model.layers.{layer}.{block}.{name}"
            low, high = (rank, ins.get(name, hidden)), (outs.get(name, hidden), rank)
            for half, shape in (("A", low), ("B", high)):
                numbers = 0.02 * torch.randn(shape)
                tensors[f"{module}.lora_{half}.weight"] = numbers.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return sum(tensor.nbytes for tensor in tensors.values())


class Decodes:
    def __init__(self, llm: LLM, num_steps: int) -> None:
        self.core, self.vocab = llm._engine.core, llm._engine.spec.vocab_size
        self.num_steps, self.random, self.ids = num_steps, random.Random(0), count(1)
        self.wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def request(self, num_prompt: int, num_output: int, adapter: str) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        prompt = random_tokens(self.random, num_prompt, self.vocab)
        made = Request.new(next(self.ids), prompt, params, arrival=time.monotonic())
        made.adapter_name = adapter
        return made

    def step_ms(self, adapters: Sequence[str]) -> float:
        """A step in which each of these decodes once; the median of some runs of ten."""
        for adapter in adapters:
            self.core.add(self.request(32, self.num_steps + 30, adapter))
        for _ in range(20):  # prompts, captures
            self.core.step()
        runs = []
        for _ in range(self.num_steps // 10):
            self.wait()
            begun = time.perf_counter()
            for _ in range(10):
                self.core.step()
            self.wait()
            runs.append(100 * (time.perf_counter() - begun))
        while self.core.has_work:
            self.core.step()
        return round(statistics.median(runs), 3)

    def prompt_ms(self, num_tokens: int, adapter: str) -> float:
        runs = []
        for _ in range(6):
            self.wait()
            begun = time.perf_counter()
            self.core.add(self.request(num_tokens, 1, adapter))
            while self.core.has_work:
                self.core.step()
            self.wait()
            runs.append(1e3 * (time.perf_counter() - begun))
        return round(statistics.median(runs[1:]), 2)


def users(names: Sequence[str], most: int, rows: int) -> list[str]:
    """An adapter for each row, spread over the first `most`."""
    some = names[:most]
    return list(islice(cycle(some[:: max(1, len(some) // rows)]), rows))


def loads(llm: LLM, folder: Path) -> Iterator[tuple[str, float]]:
    """Adapters by name, and the milliseconds that each took."""
    adapters, decodes = llm._engine.core.adapters, Decodes(llm, 0)
    assert adapters is not None
    for number in range(NUM_ADAPTERS):
        decodes.wait()
        begun = time.perf_counter()
        adapters.load(f"a{number}", str(folder))
        decodes.wait()
        yield f"a{number}", 1e3 * (time.perf_counter() - begun)


def measure(llm: LLM, folder: Path, batches: Sequence[int], num_steps: int) -> dict[str, Any]:
    decodes, prompt = Decodes(llm, num_steps), 900
    steps: dict[str, dict[str, float]] = {}

    def note(kind: str, adapters_of: Callable[[int], list[str]]) -> None:
        steps[kind] = {str(rows): decodes.step_ms(adapters_of(rows)) for rows in batches}

    note("none", lambda rows: [""] * rows)
    prompts = {"none": decodes.prompt_ms(prompt, "")}
    names, times = zip(*loads(llm, folder), strict=True)
    note("unused", lambda rows: [""] * rows)
    note("one", lambda rows: [names[0]] * rows)
    for most in MIXES:
        note(f"mixed_{most}", lambda rows, most=most: users(names, most, rows))
    note("none_again", lambda rows: [""] * rows)
    prompts["one"] = decodes.prompt_ms(prompt, names[0])
    load = {"first": times[0], "median": statistics.median(times[1:]), "worst": max(times[1:])}
    gains = {
        kind: {rows: round(100 * (ms / steps["none"][rows] - 1), 1) for rows, ms in of.items()}
        for kind, of in steps.items()
    }
    return {
        "steps": steps,
        "percent": gains,
        "prompt": {"tokens": prompt, **prompts},
        "load": {name: round(ms, 1) for name, ms in load.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--targets", choices=TARGETS, default="all")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batches", default="1,32,64")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--quantization")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    config = shrunk(SHAPES[args.shape]) if args.rehearse else dict(SHAPES[args.shape])
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(config))
        folder = Path(place) / "adapter"
        num_bytes = write_adapter(folder, config, TARGETS[args.targets], args.rank)
        llm = LLM(
            place,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=1024,
            seed=0,
            quantization=args.quantization,
            enable_prefix_caching=False,
            max_loras=NUM_ADAPTERS,
            dtype="float32" if args.rehearse and not torch.cuda.is_available() else "auto",
        )
        found = measure(llm, folder, [int(rows) for rows in args.batches.split(",")], args.steps)
    about = {"shape": args.shape, "rank": args.rank, "targets": args.targets, "bytes": num_bytes}
    print(json.dumps({**about, "quantization": args.quantization, **found}))


if __name__ == "__main__":
    main()
