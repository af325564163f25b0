"""The H200 suite: which workloads, on which shapes, how long and how often.

A row is a plain value that crosses to the process that measures it (`suite_child.py`); its figure
is milliseconds a step, milliseconds to the first token, output tokens a second, or seconds. The
workloads are those that other engines were measured with, so lengths and counts here must not be
tuned. `rehearsal` gives the same rows at a size for any machine.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quire.bench.shapes import SHAPES, Config, shrunk
from quire.errors import BadRequest

USUAL_LEN, LONG_LEN = 9216, 131072  # max_model_len without and with the rows of long contexts
OWN_TOKENS = 64  # of each prompt behind a shared prefix

# Forms of the 8B shape.
PACKED = {"int4": "rtn-int4-g128", "fp8": "fp8", "int8": "int8", "sparse24": "sparse24"}

UNITS = {
    "start": "s",
    "decode": "ms",
    "prefill": "ms",
    "mixed": "tok/s",
    "nano": "tok/s",
    "prefix": "tok/s",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `prompt` and `output` are tokens of each request."""

    name: str
    group: str
    title: str
    shape: str
    kind: str
    requests: int = 1
    prompt: int = 0
    output: int = 1
    repeats: int = 3
    need_s: float = 20.0  # the row starts only if this much time is left
    # The same prompts every time, held by the prefix cache: half a percent of noise in reading
    # 256,000 tokens is as much as a decode step.
    is_cached: bool = False
    form: str = ""  # what weights are rounded to at load; empty: they stay floats

    @property
    def unit(self) -> str:
        return UNITS[self.kind]

    @property
    def is_lower_better(self) -> bool:
        return self.unit != "tok/s"


@dataclass(frozen=True, slots=True)
class Suite:
    rows: tuple[Row, ...]
    shapes: Mapping[str, Config]
    dtype: str = "bfloat16"
    num_warm: int = 300  # requests nobody counts
    is_rehearsal: bool = False

    def max_model_len(self, rows: Sequence[Row]) -> int:
        """For the one engine that serves these rows of one shape; the longest row decides."""
        longest = max(row.prompt + row.output for row in rows)
        wanted = USUAL_LEN if longest <= USUAL_LEN else LONG_LEN
        return min(wanted, int(self.shapes[rows[0].shape]["max_position_embeddings"]))

    def select(self, words: Sequence[str]) -> Suite:
        """Rows whose name or group is among the words; no words: all."""
        known = dict.fromkeys(name for row in self.rows for name in (row.group, row.name))
        for word in words:
            if word not in known:
                near = difflib.get_close_matches(word, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise BadRequest(f"unknown row {word!r}; {hint}")
        rows = tuple(r for r in self.rows if not words or r.name in words or r.group in words)
        return replace(self, rows=rows)


def h200_suite() -> Suite:
    """All rows in the order they are measured: start-up, then shape by shape."""
    rows = (*_starts(), *_rows_8b(), *_rows_small(), *_rows_14b(), *_rows_packed())
    return Suite(rows, SHAPES | {_packed_shape(name): SHAPES["8b"] for name in PACKED})


def _starts() -> list[Row]:
    """Before all others, when nothing has warmed the machine."""
    title = "8B, process start to first token"
    first = Row("start-8b-first", "start", f"{title}, first", "8b", "start", prompt=32, repeats=1)
    again = replace(first, name="start-8b-again", title=f"{title}, again")
    return [first, again]


def _decode(shape: str, batch: int, need_s: float = 30.0) -> Row:
    group = f"decode-{shape}"
    title = f"{_named(shape)} decode, batch {batch}"
    return Row(f"{group}-{batch}", group, title, shape, "decode", batch, 128, 256, 3, need_s)


def _nano(shape: str) -> Row:
    """The public nano-vllm benchmark: 256 requests, 100-1,024 tokens in and out, drawn at 0.6."""
    name = f"nano-{shape}"
    title = f"{_named(shape)} nano benchmark"
    return Row(name, name, title, shape, "nano", 256, 1024, 1024, 2, 40.0)


def _named(shape: str) -> str:
    return "8B" if shape == "8b" else f"Qwen3-{shape.upper()}"


def _rows_8b() -> list[Row]:
    group, long = "prefill-8b", "long-8b"
    rows = [_decode("8b", batch) for batch in (1, 8, 32, 128, 256)]
    for length in (512, 2048, 8192):
        title = f"8B prefill, {length:,} tokens"
        rows.append(Row(f"{group}-{length}", group, title, "8b", "prefill", 1, length, 1, 5))
    rows += [
        Row("mixed-8b", "mixed-8b", "8B mixed, 512 requests", "8b", "mixed",
            512, 1024, 1024, 2, 60.0),
        Row("prefix-8b", "prefix-8b", "8B, 256 requests behind a 2,048-token prefix", "8b",
            "prefix", 256, 2048, 128, 2, 30.0),
        Row(f"{long}-32k", long, "8B decode at 32k context, batch 8", "8b", "decode",
            8, 32000, 96, 3, 40.0, is_cached=True),
        Row(f"{long}-128k", long, "8B decode at 128k context, batch 1", "8b", "decode",
            1, 128000, 96, 3, 40.0, is_cached=True),
    ]  # fmt: skip
    return rows


def _rows_small() -> list[Row]:
    return [*(_decode("0.6b", batch) for batch in (1, 32, 256)), _nano("0.6b")]


def _rows_14b() -> list[Row]:
    return [*(_decode("14b", batch) for batch in (1, 64)), _nano("14b")]


def _rows_packed() -> list[Row]:
    """8B in fewer bits; an engine of its own for every form."""
    rows = []
    for name, form in PACKED.items():
        shape, title = _packed_shape(name), f"8B {name}"
        for batch in (1, 32, 256):
            row = replace(_decode("8b", batch), group=f"packed-{name}", shape=shape, form=form)
            named = f"decode-{shape}-{batch}"
            rows.append(replace(row, name=named, title=f"{title} decode, batch {batch}"))
        for length in (2048, 8192):
            told = f"{title} prefill, {length:,} tokens"
            row = Row(f"prefill-{shape}-{length}", f"packed-{name}", told, shape, "prefill")
            rows.append(replace(row, prompt=length, repeats=5, form=form))
    return rows


def _packed_shape(name: str) -> str:
    return f"8b-{name}"


def request_lengths(row: Row, run: int) -> list[tuple[int, int]]:
    """(prompt, output) of each request, up to the row's own; the order of the draws is fixed."""
    low = min(100, row.prompt, row.output)
    if row.kind == "mixed":
        rng = random.Random(0)
        return [
            (rng.randint(low, row.prompt), rng.randint(low, row.output))
            for _ in range(row.requests)
        ]
    rng = random.Random(run)
    prompts = [rng.randint(low, row.prompt) for _ in range(row.requests)]
    return [(num_prompt, rng.randint(low, row.output)) for num_prompt in prompts]


def rehearsal(suite: Suite) -> Suite:
    """Every row on a tiny model with few short requests: does all of it run here?

    The figures mean nothing; what is measured, written and drawn is the same.
    """

    def small(row: Row) -> Row:
        return replace(
            row,
            requests=min(row.requests, 4),
            prompt=max(4, min(row.prompt // 64, 96)),
            output=min(row.output, 6),
            need_s=0.0,
        )

    shapes = {name: shrunk(config) for name, config in suite.shapes.items()}
    return Suite(
        tuple(small(row) for row in suite.rows), shapes, "auto", num_warm=4, is_rehearsal=True
    )
