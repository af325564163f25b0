"""Heads that draft on a GPU: what a guess costs with graphs and without, and tokens a second.

Weights are random, those of the heads too, so a head guesses as always and pays for it. Then its
drafts are told: each is right with the chance that is asked for, and what is right is what the
model drew without drafts. In a tree, where the first guess is wrong, the second is right in
`SECOND` of the cases. Telling takes an upload for each guess, which real heads do not have. Tokens
are compared with those without drafts in every row, guesses of graphs with those kernel by kernel.
Prints a JSON line for each row. Run from the repository root.

    python -m benchmarks.gpu_heads                       8b, EAGLE-3 and Medusa, 1, 8, 64 requests
    python -m benchmarks.gpu_heads --rehearse            a tiny model, on any machine
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.bench.shapes import SHAPES, shrunk, write_shape
from quire.config import EngineArgs
from quire.engine.cpu_path import CpuPath
from quire.engine.whole_ends import ops_for
from quire.load.heads import load_medusa
from quire.load.open import open_model
from quire.load.wish import Wish
from quire.request import RequestId
from quire.runner.feature_drafter import FeatureDrafter
from quire.runner.medusa_drafter import MedusaDrafter
from quire.runner.runner import ModelRunner
from quire.sched.scheduler import Scheduler
from quire.spec.neural import Neural
from quire.spec.speculation import Speculation
from quire.spec.tree import children_of
from quire.speculative import parse_speculative
from quire.step import Work

# With 64 requests a step of such trees has the size of the largest graph.
DEPTH, TREE = 4, {"tree": 2, "num_speculative_tokens": 7}
SECOND = 0.4  # of the guesses of a tree that are wrong at first
OUTPUTS = 32_000  # tokens that the EAGLE-3 head names, as published ones for Llama 3
PROMPT, UNREAD = 16, 3  # tokens of a prompt; positions that a head reads before it guesses
STD = 0.02

Drafter = FeatureDrafter | MedusaDrafter


# ------------------------------------------------------------ heads with random weights


def noise(*shape: int) -> Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = torch.randn(*shape, device=device, dtype=torch.bfloat16) * STD
    return made.cpu()


def write_head(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def write_eagle3(shape: Mapping[str, Any], folder: Path) -> str:
    """A layer like the target's, over three of its streams."""
    hidden, inner, layers = (
        shape[f"{k}"] for k in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    q, kv = (shape[k] * shape["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    outputs = min(OUTPUTS, shape["vocab_size"])
    at = "midlayer.self_attn."
    tensors = {
        "fc.weight": noise(hidden, 3 * hidden),
        f"{at}q_proj.weight": noise(q, 2 * hidden),
        f"{at}k_proj.weight": noise(kv, 2 * hidden),
        f"{at}v_proj.weight": noise(kv, 2 * hidden),
        f"{at}o_proj.weight": noise(hidden, q),
        "midlayer.mlp.gate_proj.weight": noise(inner, hidden),
        "midlayer.mlp.up_proj.weight": noise(inner, hidden),
        "midlayer.mlp.down_proj.weight": noise(hidden, inner),
        "lm_head.weight": noise(outputs, hidden),
        "d2t": torch.arange(outputs) * shape["vocab_size"] // outputs - torch.arange(outputs),
    }
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors["norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    reads = sorted({min(2, layers - 1), layers // 2, max(0, layers - 3)})
    while len(reads) < 3:
        reads.append(reads[-1])
    config = {
        **shape,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": outputs,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": reads},
    }
    return write_head(folder, config, tensors)


def medusa_for(runner: ModelRunner, folder: Path, device: str) -> MedusaDrafter:
    """Blocks of its own and the target's product, which is as large as heads' own ones."""
    hidden, model = runner.model.spec.hidden_size, runner.model
    tensors = {
        f"{head}.0.linear.{kind}": noise(*shape)
        for head in range(DEPTH)
        for kind, shape in (("weight", (hidden, hidden)), ("bias", (hidden,)))
    }
    write_head(folder, {"medusa_num_heads": DEPTH, "medusa_num_layers": 1}, tensors)
    args = EngineArgs(model=str(folder), device=device, skip_tokenizer_init=True)
    ops = ops_for(model, CpuPath.of(args, model.device))
    with torch.inference_mode():
        heads = load_medusa(open_model(args).checkpoint, model, Wish(False, None), ops)
    return MedusaDrafter(runner, heads)


# ------------------------------------------------------------ what a guess costs


Row = dict[str, Any]


def guess_rows(
    runner: ModelRunner, name: str, drafter: Drafter, batches: Sequence[int], n: int
) -> Iterator[Row]:
    """Of chains, with everything that a guess in a step does."""
    for batch in batches:
        made: Row = {"row": "guess", "head": name, "batch": batch, "depth": DEPTH}
        graphs, drafts = drafter.graphs, {}
        for form, its in (("eager", None), ("graph", graphs)):
            if form == "graph" and graphs is None:
                continue
            drafter.graphs = its  # type: ignore[assignment]
            whole, host, drafts[form] = timed_guesses(runner, drafter, batch, n)
            made |= {f"{form}_ms": whole, f"{form}_host_ms": host}
        drafter.graphs = graphs  # type: ignore[assignment]
        found = list(drafts.values())
        made["same"] = all(its == found[0] for its in found)
        yield made


@torch.inference_mode()
def timed_guesses(
    runner: ModelRunner, drafter: Drafter, batch: int, n: int
) -> tuple[float, float, list[list[int]]]:
    """(ms, ms until the host goes on, drafts)"""
    model, rows, start = runner.model, runner.rows, 4 * PROMPT
    width, num_pages = model.spec.hidden_size, -(-(start + 1 + DEPTH) // runner.spec.page_size)
    if isinstance(drafter, FeatureDrafter):
        width *= max(1, len(drafter.layer.head.reads.layers))
    generator = torch.Generator().manual_seed(7)
    states = torch.randn(batch, start, width, generator=generator)
    states = states.to(model.device, model.dtype)
    rows.needs[:] = 0  # greedy
    works = [Work(RequestId(row), row, start, 1 + DEPTH, True, DEPTH) for row in range(batch)]
    known = torch.randint(3, model.spec.vocab_size, (batch, start + 1), generator=generator)
    rows.tokens[:batch, : start + 1] = known.to(rows.tokens)
    pages = torch.arange(1, 1 + batch * num_pages).view(batch, num_pages)
    rows.page_tables[:, :batch, :num_pages] = pages.to(rows.page_tables)

    def bring(num: int) -> None:
        for row in range(batch):
            drafter._kept.put(row, start - num, states[row, start - num :])

    bring(start)  # keys of all positions
    drafter.fill(works)
    spans: list[tuple[float, float]] = []
    for turn in range(3 + n):  # compiled and captured in the first ones
        bring(UNREAD)
        wait()
        begun = time.perf_counter()
        drafter.fill(works)
        launched = time.perf_counter()
        wait()
        if turn >= 3:
            spans.append((time.perf_counter() - begun, launched - begun))
    rows.page_tables.zero_()  # of pages that nobody holds
    drafts = rows.tokens[:batch, start + 1 : start + 1 + DEPTH].tolist()
    whole, host = (round(1e3 * median(its), 3) for its in zip(*spans, strict=True))
    return whole, host, drafts


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ------------------------------------------------------------ tokens a second


class Teller:
    """Writes over what a head guessed, as right as asked for."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, drafter: Drafter) -> None:
        self._runner, self._scheduler, self._fill = runner, scheduler, drafter.fill
        self.chance = 0.0
        self.answers: dict[tuple[int, ...], list[int]] = {}  # by prompt
        self._known: dict[RequestId, tuple[int, list[int], random.Random]] = {}
        drafter.fill = self.fill  # type: ignore[method-assign]

    def begin(self, answers: dict[tuple[int, ...], list[int]], chance: float) -> None:
        self.answers, self.chance = answers, chance
        self._known.clear()

    def fill(self, works: Sequence[Work]) -> None:
        self._fill(works)
        told: list[tuple[int, int, int]] = []  # (row, place, token)
        for work in works:
            told += ((work.row, *its) for its in self._told(work))
        if told:
            sent = self._runner.uploader.send_one(torch.tensor(told).T.contiguous())
            rows, places, tokens = sent
            self._runner.rows.tokens[rows, places] = tokens.int()

    def _told(self, work: Work) -> list[tuple[int, int]]:
        first, answer, rng = self._of(work.request_id)
        parents = work.parents or tuple(range(work.num_drafts))
        is_right, depth = {0: True}, {0: 0}
        made = []
        for node, children in enumerate(children_of(parents)):
            at = work.start + 1 + depth[node] - first
            right, luck = answer[at] if at < len(answer) else 0, rng.random()
            bounds = (self.chance, self.chance + (1 - self.chance) * SECOND)
            rank_right = next((rank for rank, to in enumerate(bounds) if luck < to), -1)
            for rank, child in enumerate(children):
                depth[child] = depth[node] + 1
                is_right[child] = is_right[node] and rank == rank_right
                vocab = self._runner.model.spec.vocab_size
                token = right if is_right[child] else (right + 1 + rank) % vocab
                made.append((work.start + child, token))
        return made

    def _of(self, id: RequestId) -> tuple[int, list[int], random.Random]:
        """Where the answer begins, the answer, and luck of its own."""
        if id not in self._known:
            request = self._scheduler.running[id]
            prompt = tuple(request.tokens[: request.num_prompt])
            luck = random.Random(str(prompt))
            self._known[id] = (len(prompt), self.answers[prompt], luck)
        return self._known[id]


class Way(NamedTuple):
    name: str
    chance: float | None  # None: no drafts
    config: Mapping[str, Any]


def ask(llm: LLM, prompts: list[list[int]], options: argparse.Namespace, temperature: float,
        depth: int | None) -> tuple[float, int, list[list[int]]]:  # fmt: skip
    params = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=options.tokens,
            ignore_eos=True,
            num_speculative_tokens=depth,
        )
        for seed in range(len(prompts))
    ]
    llm.reset_prefix_cache()
    steps, begun = llm.stats().num_steps, time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return seconds, llm.stats().num_steps - steps, tokens


def speed_rows(llm: LLM, name: str, teller: Teller, options: argparse.Namespace) -> Iterator[Row]:
    drafts = llm._engine.core.drafts
    assert isinstance(drafts, Speculation)
    forms = {"chain of 4": {"num_speculative_tokens": DEPTH}, "tree of 2": TREE}
    for batch in options.batches:
        prompts = [[(31 * i + 7 * at) % 500 + 3 for at in range(PROMPT)] for i in range(batch)]
        for temperature in options.temperatures:
            runs = [ask(llm, prompts, options, temperature, 0) for _ in range(2)]
            plain, want = min(run[0] for run in runs), runs[0][2]
            answers = dict(zip(map(tuple, prompts), want, strict=True))
            row = {"row": "speed", "head": name, "batch": batch, "T": temperature}
            rate = round(batch * options.tokens / plain, 1)
            yield row | {"drafts": "none", "tok/s": rate, "steps": runs[0][1]}
            for form, keys in forms.items():
                config = parse_speculative({"method": name, "model": "-", "adaptive": False} | keys)
                drafts.proposer = Neural(config)
                drafts.limits = drafts.limits._replace(depth=config.depth, is_fixed=True)
                for chance in options.chances:
                    runs = []
                    for _ in range(1 + options.rounds):  # graphs are captured in the first
                        drafts.restart()
                        teller.begin(answers, chance)
                        runs.append(ask(llm, prompts, options, temperature, None))
                    best = min(run[0] for run in runs[1:])
                    yield row | {
                        "drafts": form,
                        "chance": chance,
                        "tok/s": round(batch * options.tokens / best, 1),
                        "times": round(plain / best, 2),
                        "steps": runs[-1][1],
                        "same": all(run[2] == want for run in runs),
                    }


# ------------------------------------------------------------ all of it


def opened(shape: Mapping[str, Any], folder: Path, options: argparse.Namespace) -> LLM:
    config = {"method": "eagle3", "model": write_eagle3(shape, folder / "eagle3")}
    return LLM(
        write_shape(shape, folder / "target"),
        load_format="dummy",
        device="cuda" if torch.cuda.is_available() else "cpu",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=max(options.batches),
        kv_cache_memory=options.cache << 20,
        speculative_config=config | {"adaptive": False, "num_speculative_tokens": DEPTH},
    )


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    shape = shrunk(SHAPES["8b"]) if options.rehearse else dict(SHAPES["8b"])
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as at:
        llm = opened(shape, Path(at), options)
        runner, core = llm._engine.runner, llm._engine.core
        drafter = runner.drafter
        assert isinstance(drafter, FeatureDrafter)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        yield {"row": "start", "device": device, "seconds": round(time.perf_counter() - begun, 1)}
        medusa = medusa_for(runner, Path(at) / "medusa", runner.model.device.type)
        guesses = {"eagle3": drafter, "medusa": medusa}
        for name, its in guesses.items():
            yield from guess_rows(runner, name, its, options.batches, options.guesses)
        for name, its in guesses.items():
            if name not in options.heads:
                continue
            if name == "medusa":
                runner.hand_over(medusa.heads.reads)
            runner.drafter = its
            yield from speed_rows(llm, name, Teller(runner, core.scheduler, its), options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--heads", nargs="+", default=["eagle3", "medusa"])
    parser.add_argument("--chances", nargs="+", type=float, default=[0.6, 0.8])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--guesses", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cache", type=int, default=8 << 10, help="MiB of keys and values")
    parser.add_argument("--max-seconds", type=float, default=100.0)
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, on any machine")
    options = parser.parse_args()
    if options.rehearse:
        options.batches, options.tokens, options.guesses, options.cache = [1, 3], 24, 2, 64
    begun, is_same = time.perf_counter(), True
    for row in rows_of(options):
        print(json.dumps(row), flush=True)
        is_same &= row.get("same", True)
        if time.perf_counter() - begun > options.max_seconds:
            print(json.dumps({"row": "end", "why": f"{options.max_seconds:g} s are over"}))
            break
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
