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

from quire.compress.output import JOURNAL, REPORT, UNFINISHED
from quire.compress.pipeline import Job, Listen, Progress, compress
from quire.compress.recipe_file import Plan
from quire.errors import BadRequest

PLAN = "plan.json"


@dataclass(frozen=True, slots=True)
class Chain:
    model: str
    out: Path
    plan: Plan
    device: torch.device

    def run(self, listen: Listen) -> dict[str, Any]:
        """The report of each step. Raises QuireError."""
        self._begin()
        model, reports = self.model, []
        for number, step in enumerate(self.plan.steps, 1):
            is_last = number == len(self.plan.steps)
            out = self.out if is_last else self._between / f"{number}-{step.recipe.method}"
            if not _is_done(out):
                job = Job(model, out, step.recipe, self.plan.calibration, step.keep, self.device)
                compress(job, _numbered(listen, number, len(self.plan.steps)))
            reports.append(json.loads((out / REPORT).read_text()))
            model = str(out)
        shutil.rmtree(self._between)
        return {"what": "compress", "model": self.model, "steps": reports}

    @property
    def _between(self) -> Path:
        return self.out.with_name(self.out.name + ".steps")

    def _begin(self) -> None:
        """Raises BadRequest where something else was begun here."""
        noted = self._between / PLAN
        asked = {
            "model": self.model,
            "steps": [asdict(step) for step in self.plan.steps],
            "calibration": [self.plan.calibration.sha256, *asdict(self.plan.calibration).values()],
        }
        asked = json.loads(json.dumps(asked, default=str))
        if noted.exists():
            if json.loads(noted.read_text()) != asked:
                raise BadRequest(
                    f"{self._between} holds what was begun with another model, recipe or"
                    " calibration; give --out a new folder, or the same options as before",
                    param="out",
                )
            return
        if self.out.exists() and any(self.out.iterdir()):
            raise BadRequest(f"{self.out} is not empty; give --out a new folder", param="out")
        self._between.mkdir(parents=True, exist_ok=True)
        unfinished = noted.with_name(PLAN + UNFINISHED)
        unfinished.write_text(json.dumps(asked))
        unfinished.rename(noted)


def _is_done(folder: Path) -> bool:
    """The config is written last, and the journal goes after it."""
    return (folder / "config.json").exists() and not (folder / JOURNAL).exists()


def _numbered(listen: Listen, number: int, count: int) -> Listen:
    def tell(made: Progress) -> None:
        step = f"step {number} of {count}, "
        listen(Progress(made.done, made.total, step + made.what, made.error, made.is_resumed))

    return tell
