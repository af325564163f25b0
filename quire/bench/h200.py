"""Runs the suite: one fresh process per shape, and every figure on disk as soon as it is known.

This process never imports torch, so it holds none of the device's memory and start-up rows, which
come first, are what a user sees. A killed run keeps what it measured; a later run with other rows
adds to the same file. A row that brings its process down is noted, and the rows behind it get a new
process. The table is made from the file by `suite_report.py`.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire.bench.peers import H200
from quire.bench.shapes import write_shape
from quire.bench.startup import ChildFailed, child_records, start_once
from quire.bench.suite import Row, Suite
from quire.bench.suite_limits import limit_of, step_load
from quire.errors import BadRequest
from quire.models.registry import spec_of
from quire.version import __version__

Record = dict[str, Any]
REHEARSAL = "h200 rehearsal"  # no figure in such a file means anything


@dataclass(frozen=True, slots=True)
class RunOptions:
    out: Path
    max_seconds: float = 540.0
    engine: Record | None = None  # further arguments of `LLM`
    say: Callable[[str], None] = lambda text: None


class ResultFile:
    """{"rows": {name: record}, "engines": {shape: ...}}, whole on disk after every change."""

    def __init__(self, path: Path, what: str = "h200") -> None:
        self.path = path
        self.data: Record = {"what": what, "rows": {}, "engines": {}}
        if path.exists():
            self.data = read_results(path)
            if self.data["what"] != what:
                raise BadRequest(f"{path} holds {self.data['what']!r}, not {what!r}; name another")

    def put(self, kind: str, name: str, record: Record) -> None:
        _replace(self.data[kind], name, record)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_name(self.path.name + ".part")
            beside.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
            os.replace(beside, self.path)
        except OSError as error:
            raise BadRequest(f"cannot write {self.path}: {error.strerror}") from error


def read_results(path: Path) -> Record:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadRequest(f"cannot read results from {path}: {error}") from error
    if not isinstance(data, dict) or data.get("what") not in ("h200", REHEARSAL):
        raise BadRequest(f"{path} is not a file of 'quire bench h200'; name another")
    return data


def merged_results(paths: Sequence[Path]) -> Record:
    """Several files as one; where two have a row, the later file's stands."""
    found = [read_results(path) for path in paths]
    kinds = {data["what"] for data in found}
    if len(kinds) != 1:
        raise BadRequest("a rehearsal's figures mean nothing: give files of real runs only")
    whole: Record = {"what": kinds.pop(), "rows": {}, "engines": {}}
    for data in found:
        for kind in ("rows", "engines"):
            for name, record in data.get(kind, {}).items():
                _replace(whole[kind], name, record)
    return whole


def _replace(records: Record, name: str, record: Record) -> None:
    """Take the later record, unless it only says that there was no time for the row."""
    if not ("skipped" in record and "value" in records.get(name, {})):
        records[name] = record


def run_suite(suite: Suite, options: RunOptions) -> Record:
    """Measure every row; returns what the file holds at the end."""
    return SuiteRun(suite, options).run()


class SuiteRun:
    def __init__(self, suite: Suite, options: RunOptions) -> None:
        self.suite, self.options = suite, options
        self.file = ResultFile(options.out, REHEARSAL if suite.is_rehearsal else "h200")
        self.ready: set[str] = set()  # shapes whose engine came up
        self.begin = time.perf_counter()

    @property
    def seconds_left(self) -> float:
        return self.options.max_seconds - (time.perf_counter() - self.begin)

    def run(self) -> Record:
        with tempfile.TemporaryDirectory() as folder:
            for shape in dict.fromkeys(row.shape for row in self.suite.rows):
                model = write_shape(self.suite.shapes[shape], Path(folder) / shape)
                rows = [row for row in self.suite.rows if row.shape == shape]
                self._starts(model, self._in_time([r for r in rows if r.kind == "start"]))
                self._shape(shape, model, self._in_time([r for r in rows if r.kind != "start"]))
        return self.file.data

    def _in_time(self, rows: list[Row]) -> list[Row]:
        """Rows that still have time; others are noted as skipped. The child checks again."""
        left = self.seconds_left
        for row in rows:
            if row.need_s > left:
                late = f"{left:.0f} s left, may need {row.need_s:.0f}"
                self._note(row, {"skipped": late})
        return [row for row in rows if row.need_s <= left]

    def _engine_options(self, rows: list[Row]) -> Record:
        return {
            "load_format": "dummy",
            "dtype": self.suite.dtype,
            "max_model_len": self.suite.max_model_len(rows),
            "seed": 0,
            **({"quantization": rows[0].form} if rows[0].form else {}),
            **(self.options.engine or {}),
        }

    def _starts(self, model: str, rows: list[Row]) -> None:
        """Twice with one folder for compiled kernels: empty the first time, filled the second."""
        if not rows:
            return
        options = self._engine_options(rows)
        with tempfile.TemporaryDirectory() as kernels:
            for turn in ("first", "again"):
                try:
                    found = start_once(model, options, Path(kernels))
                    record: Record = {"value": found["total"], "runs": found}
                except ChildFailed as error:
                    record = {"error": str(error), "trace": error.trace}
                for row in rows:
                    if row.name.endswith(turn):
                        self._note(row, record)

    def _shape(self, shape: str, model: str, rows: list[Row]) -> None:
        waiting = list(rows)
        while waiting:
            try:
                self._measure(shape, model, waiting, self._engine_options(rows))
            except ChildFailed as error:
                record = {"error": str(error), "trace": error.trace}
                # The row it was about to measure is to blame. An engine that never came up will not
                # come up for the other rows either.
                num_lost = 1 if shape in self.ready else len(waiting)
                for row in waiting[:num_lost]:
                    self._note(row, record)
                waiting = waiting[num_lost:]

    def _measure(self, shape: str, model: str, waiting: list[Row], options: Record) -> None:
        """Measure rows in one process; each leaves `waiting` when its figure is there."""
        self.ready.discard(shape)
        task = {
            "model": model,
            "options": options | {"skip_tokenizer_init": True},
            "num_warm": self.suite.num_warm,
            "rows": [asdict(row) for row in waiting],
            "seconds": self.seconds_left,
        }
        for record in child_records("quire.bench.suite_child", task):
            if "engine" in record:
                self.ready.add(shape)
                self.file.put("engines", shape, record)
            else:
                assert record.pop("row") == waiting[0].name
                self._note(waiting.pop(0), record)

    def _note(self, row: Row, record: Record) -> None:
        """Add what can be known without the device, save, and tell."""
        spec = spec_of(self.suite.shapes[row.shape])
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        record = {**asdict(row), "unit": row.unit, "quire": __version__, "at": stamp, **record}
        record["limit"] = limit_of(row, spec, H200)
        load = step_load(row, spec)
        if load is not None:
            record["step_bytes"], record["step_flops"] = load.num_bytes, load.num_flops
            record["step_tokens"] = row.requests if row.kind == "decode" else row.prompt
        self.file.put("rows", row.name, record)
        shown = record.get("skipped") or record.get("error")
        if "value" in record:
            shown = f"{record['value']:.4g} {row.unit}"
        self.options.say(f"{row.title}: {shown}  ({self.seconds_left:.0f} s left)")
