"""Chain: the steps of a recipe, each over the model that the one before wrote.

What lies between is written beside the result, in `OUT.steps/`, and goes when the last step is
done. Each step takes up where it died (`output.py`); a step that was done is not done again. The
plan is noted there too, so that another recipe is not taken for the same one.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quire.compress.finished import same_asked
from quire.compress.output import REPORT, Output, is_done, told
from quire.compress.pipeline import Job, Listen, Progress, compress
from quire.compress.recipe_file import Plan
from quire.errors import BadRequest
from quire.jsonfile import read_object

PLAN = "plan.json"
CHAIN, BEFORE = "chain", "steps_before"  # in the report of the last step


@dataclass(frozen=True, slots=True)
class Chain:
    model: str
    out: Path
    plan: Plan
    device: torch.device

    def run(self, listen: Listen) -> dict[str, Any]:
        """The report of each step. Raises QuireError."""
        if self._between.exists() and (was_done := self.finished()) is not None:
            return was_done
        self._begin()
        model, reports = self.model, list[dict[str, Any]]()
        for number, step in enumerate(self.plan.steps, 1):
            is_last = number == len(self.plan.steps)
            out = self.out if is_last else self._between / f"{number}-{step.recipe.method}"
            if not is_done(out):
                job = Job(model, out, step.recipe, self.plan.calibration, step.keep, self.device)
                compress(job, _numbered(listen, number, len(self.plan.steps)))
            reports.append(read_object(out / REPORT))
            model = str(out)
        self._note(reports)
        shutil.rmtree(self._between)
        return self._report(reports)

    def finished(self) -> dict[str, Any] | None:
        """What `run` returned when this chain was done; None where it was not."""
        if not is_done(self.out):
            return None
        report = same_asked(self.out, {CHAIN: self._asked()})
        if report is None:
            return None
        shutil.rmtree(self._between, ignore_errors=True)  # which a kill had left
        return self._report([*report[BEFORE], report])

    def _note(self, reports: list[dict[str, Any]]) -> None:
        """In the last step's report, which stays: all that was asked, what the steps before did,
        and the text that any of them was calibrated on."""
        *before, last = reports
        texts = [report["calibration"] for report in reports if "calibration" in report]
        noted = {**last, CHAIN: self._asked(), BEFORE: before}
        noted |= {"calibration": texts[-1]} if texts else {}
        Output(self.out, 0).write(REPORT, json.dumps(noted, indent=2).encode() + b"\n")

    def _report(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        steps = [{k: v for k, v in one.items() if k not in (CHAIN, BEFORE)} for one in reports]
        return {"what": "compress", "model": self.model, "steps": steps}

    def _asked(self) -> dict[str, Any]:
        text = self.plan.calibration
        asked = {
            "model": self.model,
            "steps": [asdict(step) for step in self.plan.steps],
            "calibration": [text.sha256, *asdict(text).values()],
        }
        made: dict[str, Any] = json.loads(json.dumps(asked, default=str))
        return made

    @property
    def _between(self) -> Path:
        return self.out.with_name(self.out.name + ".steps")

    def _begin(self) -> None:
        """Raises BadRequest where something else was begun here."""
        noted = self._between / PLAN
        if noted.exists():
            if read_object(noted) != self._asked():
                raise BadRequest(
                    f"{self._between} holds what was begun with another model, recipe or"
                    " calibration; give --out a new folder, or the same options as before",
                    param="out",
                )
            return
        if self.out.exists() and any(self.out.iterdir()):
            raise BadRequest(f"{self.out} is not empty; give --out a new folder", param="out")
        with told(self._between):
            self._between.mkdir(parents=True, exist_ok=True)
        Output(self._between, 0).write(PLAN, json.dumps(self._asked()).encode())


def _numbered(listen: Listen, number: int, count: int) -> Listen:
    def tell(made: Progress) -> None:
        step = f"step {number} of {count}, "
        listen(Progress(made.done, made.total, step + made.what, made.error, made.is_resumed))

    return tell
