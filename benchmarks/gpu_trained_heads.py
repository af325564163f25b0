"""Heads trained on a GPU on the spot, and what they gain there: from answers to tokens a second.

    python -m benchmarks.gpu_trained_heads --parts FOLDER --minutes 1.5 --max-seconds 560
    python -m benchmarks.gpu_trained_heads --rehearse       a tiny model, on any machine

The model writes answers for `--answer-minutes`, and every pupil learns from them for `--minutes`,
all by `quire distill`'s own doing. Then an engine drafts with it: tokens a step, as
`accepted_lengths` counts them, and tokens a second at 1, 8 and 64 requests, none's in the same run.
`differing` counts answers that are not none's, which must be 0. An early exit is cut as well,
without learning. "by cost" lets the engine choose the depth; the other rows feed all drafts. Prints
a JSON line a row, as it comes. `--parts` joins the files of a folder, in the order of their names.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.accepted_lengths import PROMPTS, answers, lengths, likeliest
from benchmarks.gpu_distil import ANSWERS, MOST, Answering, Clock, Lesson, joined
from quire import LLM, SamplingParams
from quire.distill.engines import let_go
from quire.distill.recipe import Corpus, Recipe, Schedule, Shape
from quire.models.tiny import tiny_model
from quire.runner.device import pick_device
from quire.spec.neural import Neural
from quire.spec.speculation import Speculation
from quire.speculative import parse_speculative

KINDS, CUT = ("eagle3", "medusa", "early_exit"), "early_exit cut"
DEPTH = 4  # drafts of a chain, tokens that heads learn to guess ahead
# With 64 requests a step of such trees has the size of the largest graph.
TREE = {"tree": 2, "num_speculative_tokens": 7}
TEMPERATURES = (0.0, 1.0)
LEAST_S = 20.0  # of what is left: no pupil begins to learn with less

Row = dict[str, Any]


class OutOfTime(BaseException):
    """No part of a run may take it for an error of its own."""


class Form(NamedTuple):
    name: str
    keys: Mapping[str, int]
    is_fixed: bool = True


CHAIN = Form(f"chain of {DEPTH}", {"num_speculative_tokens": DEPTH})
TREES = Form("tree of 2", TREE)
BY_COST = Form("chain by cost", {"num_speculative_tokens": DEPTH}, is_fixed=False)


@dataclass(frozen=True)
class Drafter:
    name: str
    config: Mapping[str, Any]

    @property
    def forms(self) -> tuple[Form, ...]:
        return (CHAIN, TREES) if self.config["method"] in ("eagle3", "medusa") else (CHAIN,)


# ------------------------------------------------------------ learning


@dataclass
class School:
    """A model's answers, and who learns from them."""

    model: str
    folder: Path
    device: torch.device
    clock: Clock
    options: Namespace

    def write_answers(self) -> Row:
        options = self.options
        corpus = Corpus(MOST, options.tokens, (0.0, 0.7, 1.0))
        asking = Answering(self.folder / ANSWERS, corpus, 60 * options.answer_minutes)
        with self.clock.phase("answers"):
            made = asking.collect(self.model, self.device)
        let_go(self.device)
        self.corpus = replace(corpus, answers=len(made))
        rate = round(asking.tokens_per_second(made))
        return {"row": "answers", "answers": len(made), "tokens_per_s": rate}

    def teach(self, kind: str, seconds: float) -> Row:
        own = self.folder / kind
        own.mkdir()
        shutil.copy(self.folder / ANSWERS, own / ANSWERS)
        shape = Shape(kind, depth=None if kind == "early_exit" else DEPTH)
        schedule = Schedule(
            batch=self.options.batch, learning_rate=self.options.learning_rate, warmup=40
        )
        recipe = Recipe(self.model, shape, self.corpus, schedule)
        report, _ = Lesson(recipe, own, self.device, self.clock).learn(seconds)
        let_go(self.device)
        return {
            "row": "learned",
            "head": kind,
            "seconds": round(seconds, 1),
            "steps": report["schedule"]["steps"],
            "million_values": round(report["trained_values"] / 1e6, 1),
            "before": short(report["before"]),
            "after": short(report["after"]),
        }

    def drafter(self, kind: str) -> Drafter:
        return Drafter(kind, {"method": kind, "model": str(self.folder / kind / "out")})


def short(judged: Mapping[str, float]) -> dict[str, float]:
    return {name: round(judged[name], 4) for name in ("loss", "accepted")}


# ------------------------------------------------------------ drafting


@dataclass
class Measured:
    """An engine whose drafts are fed in one form or another."""

    llm: LLM
    drafter: Drafter
    options: Namespace

    def take(self, form: Form) -> None:
        drafts = self.llm._engine.core.drafts
        assert isinstance(drafts, Speculation)
        asked = {"method": self.drafter.config["method"], "model": "-", **form.keys}
        config = parse_speculative(asked)
        if config.tree is not None:  # no deeper than there are heads
            config = replace(config, tree=None, speculative_token_tree=config.token_tree(DEPTH))
        drafts.restart()
        drafts.proposer = Neural(config)
        drafts.limits = drafts.limits._replace(depth=config.depth, is_fixed=form.is_fixed)

    def accepted(self) -> Iterator[Row]:
        asked = Namespace(tokens=self.options.measured_tokens, prompts="chat")
        for temperature in TEMPERATURES:
            plain = ids_of(answers(self.llm, asked, temperature, 0))
            for form in self.drafter.forms:
                self.take(form)
                has_two = form is CHAIN and temperature
                for drawn in ("coupled", "likeliest") if has_two else ("coupled",):
                    with likeliest(self.llm) if drawn == "likeliest" else nullcontext():
                        made = answers(self.llm, asked, temperature, None)
                    yield {
                        "row": "accepted",
                        "head": self.drafter.name,
                        "drafts": form.name,
                        "T": temperature,
                        "drawn": drawn,
                        **lengths(made, form.keys["num_speculative_tokens"]),
                        "differing": num_differing(ids_of(made), plain),
                    }

    def speeds(self) -> Iterator[Row]:
        for batch in self.options.batches:
            for temperature in TEMPERATURES:
                row = {"row": "speed", "head": self.drafter.name, "batch": batch, "T": temperature}
                plain, steps, want = self._best(batch, temperature, 0)
                count = sum(map(len, want))
                rate = round(count / plain, 1)
                yield row | {"drafts": "none", "tok/s": rate, "steps": steps}
                for form in (*self.drafter.forms, BY_COST):
                    self.take(form)
                    best, steps, made = self._best(batch, temperature, None)
                    yield row | {
                        "drafts": form.name,
                        "tok/s": round(count / best, 1),
                        "times": round(plain / best, 2),
                        "steps": steps,
                        "differing": num_differing(made, want),
                    }

    def _best(
        self, batch: int, temperature: float, depth: int | None
    ) -> tuple[float, int, list[list[int]]]:
        """(seconds, steps, tokens)"""
        found = []
        for _ in range(1 + self.options.rounds):  # graphs are captured in the first
            found.append(self._ask(batch, temperature, depth))
        seconds = min(seconds for seconds, _, _ in found[1:])
        return seconds, found[-1][1], found[-1][2]

    def _ask(
        self, batch: int, temperature: float, depth: int | None
    ) -> tuple[float, int, list[list[int]]]:
        texts = [PROMPTS["chat"][i % len(PROMPTS["chat"])] for i in range(batch)]
        params = [
            SamplingParams(
                temperature=temperature,
                max_tokens=self.options.measured_tokens,
                seed=seed,
                ignore_eos=True,
                num_speculative_tokens=depth,
            )
            for seed in range(batch)
        ]
        self.llm.reset_prefix_cache()
        chats: list[Any] = [[{"role": "user", "content": text}] for text in texts]
        steps, begun = self.llm.stats().num_steps, time.perf_counter()
        made = self.llm.chat(chats, params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        return seconds, self.llm.stats().num_steps - steps, ids_of(made)


def ids_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def num_differing(made: list[list[int]], want: list[list[int]]) -> int:
    return sum(ours != theirs for ours, theirs in zip(made, want, strict=True))


def measured(school: School, drafter: Drafter) -> Iterator[Row]:
    options = school.options
    with school.clock.phase(f"engine for {drafter.name}"):
        llm = LLM(
            school.model,
            device=school.device.type,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            max_num_seqs=max(16, *options.batches),
            kv_cache_memory=options.cache << 20,
            speculative_config={**drafter.config, "num_speculative_tokens": DEPTH},
        )
    its = Measured(llm, drafter, options)
    yield from its.accepted()
    yield from its.speeds()


# ------------------------------------------------------------ all of it


def rows_of(options: Namespace, folder: Path) -> Iterator[Row]:
    device, clock = pick_device("auto")[0], Clock()
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    model = options.model
    if options.rehearse:
        model = str(tiny_model("llama", folder / "model", num_hidden_layers=3))
    elif options.parts:
        model = joined(options.parts, folder)
    school = School(model, folder, device, clock, options)
    yield {"row": "start", "device": name, "dtype": options.dtype}
    yield school.write_answers()
    for kind in options.kinds:
        seconds = min(60 * options.minutes, options.max_seconds - clock.seconds - LEAST_S)
        if seconds <= 0:
            yield {"row": "left out", "head": kind, "why": "no time left to learn"}
            continue
        yield school.teach(kind, seconds)
        yield from measured(school, school.drafter(kind))
        let_go(device)
    if "early_exit" in options.kinds:
        yield from measured(school, Drafter(CUT, {"method": "early_exit"}))
    yield {"row": "end", "phases_s": clock.phases}


def stop_after(seconds: float) -> None:
    def stop(number: int, frame: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="default")
    parser.add_argument("--parts", type=Path, help="a folder with the pieces of a GGUF file")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--minutes", type=float, default=1.5, help="of learning, for each kind")
    parser.add_argument("--answer-minutes", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer to learn from")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--measured-tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="auto", help="of the engine that is measured")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--cache", type=int, default=8 << 10, help="MiB of keys and values")
    parser.add_argument("--max-seconds", type=float, default=570.0)
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, on any machine")
    options = parser.parse_args()
    if options.rehearse:
        options.batches, options.measured_tokens, options.tokens = [1, 3], 24, 24
        options.minutes, options.answer_minutes, options.cache = 0.15, 0.05, 64
        options.max_model_len = 256
    is_same = True
    stop_after(options.max_seconds)
    with tempfile.TemporaryDirectory() as folder:
        try:
            for row in rows_of(options, Path(folder)):
                print(json.dumps(row), flush=True)
                is_same &= not row.get("differing", 0)
        except OutOfTime:
            print(json.dumps({"row": "end", "why": f"{options.max_seconds:g} s are over"}))
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
