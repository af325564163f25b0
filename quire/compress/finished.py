"""Finished: what a folder holds that the same command has written already.

A run may die after its weights were written and before they were judged. The same command again
then finds them here, and has nothing left to do but to judge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.compress.methods import pass_of
from quire.compress.output import REPORT, is_done
from quire.compress.pipeline import Job, asked_of
from quire.compress.source import Source
from quire.jsonfile import read_object


def finished(job: Job) -> dict[str, Any] | None:
    """The report of a run that was asked for just this; None where there is none."""
    if not is_done(job.out):
        return None
    source = Source.open(job.model)
    return same_asked(job.out, asked_of(job, source, _reads_text(job, source)))


def same_asked(folder: Path, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """The folder's report, if it says all of this."""
    report = read_object(folder / REPORT)
    said = json.loads(json.dumps(dict(asked), default=str))
    return report if said.items() <= report.items() else None


def _reads_text(job: Job, source: Source) -> bool:
    if job.recipe.method in ("gguf", "shrink"):
        return job.recipe.method == "shrink"
    return pass_of(job.recipe.method)(job.recipe, source.dtype).needs.calibration
