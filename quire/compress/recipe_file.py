"""A recipe in a file: several passes, one after the other, as TOML.

    [calibration]            # or the built-in text
    file = "mine.txt"
    samples = 64
    length = 512

    [[step]]
    method = "sparsegpt"
    pattern = "2:4"

    [[step]]
    method = "gptq"
    bits = 4
    keep = ["lm_head", "down_proj"]

A step's keys are the options of `quire quantize`, `prune` and `shrink` without their dashes.
`chain.py` runs it.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from quire.compress.calibration import Calibration
from quire.compress.methods import ALL, usually_kept
from quire.compress.passes.recipe import OPTIONS, Recipe
from quire.errors import BadRequest, shown

SAMPLES, LENGTH = 64, 512
MAX_BYTES = 1 << 20
# "act-order" -> "act_order": options that take something away are named by what they take away.
FIELDS = {option.removeprefix("--").removeprefix("no-"): name for name, option in OPTIONS.items()}
CALIBRATION = {"file": str, "samples": int, "length": int}


@dataclass(frozen=True, slots=True)
class Step:
    recipe: Recipe
    keep: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    steps: tuple[Step, ...]
    calibration: Calibration


def read_plan(path: Path) -> Plan:
    """Raises BadRequest, which names the key."""
    said = _read(path)
    _check_keys(said, ("step", "calibration"), str(path))
    steps = said.get("step")
    if not isinstance(steps, list) or not steps or not all(isinstance(s, dict) for s in steps):
        raise BadRequest(f"{path}: want at least one [[step]] with a method", param="recipe")
    made = [_step(step, f"{path}, step {i}") for i, step in enumerate(steps, 1)]
    return Plan(tuple(made), _calibration(said.get("calibration", {}), path))


def _read(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        if len(data) > MAX_BYTES:
            raise BadRequest(f"{path} has {len(data)} bytes, want {MAX_BYTES} at most")
        return tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror}", param="recipe") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadRequest(f"{path} is no TOML: {error}", param="recipe") from None


def _step(said: Mapping[str, Any], where: str) -> Step:
    _check_keys(said, ("method", "keep", *FIELDS), where)
    method = said.get("method")
    if not isinstance(method, str) or method not in ALL:
        near = difflib.get_close_matches(str(method), ALL, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BadRequest(
            f"{where}: got method={shown(method)}, want one of {', '.join(ALL)}{hint}",
            param="method",
        )
    keep = said.get("keep", list(usually_kept(method)))
    if not isinstance(keep, list) or not all(isinstance(name, str) for name in keep):
        raise BadRequest(f"{where}: got keep={shown(keep)}, want a list of names", param="keep")
    hints = get_type_hints(Recipe)
    fields = {
        FIELDS[key]: _typed(
            key, value, get_args(hints[FIELDS[key]]) or (hints[FIELDS[key]],), where
        )
        for key, value in said.items()
        if key in FIELDS
    }
    return Step(Recipe(method, **fields), tuple(keep))


def _typed(key: str, value: object, kinds: Iterable[type], where: str) -> Any:
    for kind in kinds:
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is kind:
            return value
    names = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    raise BadRequest(f"{where}: got {key}={shown(value)}, want {names}", param=key)


def _calibration(said: object, path: Path) -> Calibration:
    if not isinstance(said, Mapping):
        raise BadRequest(f"{path}: got calibration={shown(said)}, want a table")
    where = f"{path}, calibration"
    _check_keys(said, CALIBRATION, where)
    found = {key: _typed(key, value, (CALIBRATION[key],), where) for key, value in said.items()}
    samples, length = found.get("samples", SAMPLES), found.get("length", LENGTH)
    if samples < 1 or length < 1:
        raise BadRequest(f"{where}: got samples={samples} and length={length}, want 1 or more")
    file = found.get("file")
    return Calibration(samples, length, None if file is None else path.parent / file)


def _check_keys(said: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = tuple(known)
    for key in said:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise BadRequest(f"{where}: unknown key {key!r}; {hint}", param="recipe")
