"""Which engines can be measured here: installed, and able to read the model in some form.

A peer that cannot is no error: it is named with what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from quire.bench.cpu.children import Children
from quire.bench.cpu.engines import OURS, PEERS
from quire.bench.cpu.work import WORKLOADS
from quire.errors import BadRequest


class Place(NamedTuple):
    model: str
    python: str | None  # None: the one that runs this
    version: str


@dataclass(frozen=True, slots=True)
class Found:
    places: dict[str, Place] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # engine -> what to do about it


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was asked for on the command line, checked."""

    model: Path
    against: tuple[str, ...]
    workloads: tuple[str, ...]
    pythons: Mapping[str, str]  # peer -> the Python that has it
    models: Mapping[str, str]  # peer -> a form of the model of its own


def names_of(option: str, text: str | None, known: Iterable[str]) -> tuple[str, ...]:
    """Names between commas, all known; None: all there are.

    >>> names_of("--workloads", "decode,cold", ("decode", "prefill", "cold"))
    ('decode', 'cold')
    """
    known = tuple(known)
    if text is None:
        return known
    names = tuple(dict.fromkeys(filter(None, text.split(","))))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise BadRequest(f"got {option} {name!r}: {hint}")
    return names


def workloads_of(text: str | None) -> tuple[str, ...]:
    names = names_of("--workloads", text, WORKLOADS)
    if not names:
        raise BadRequest(f"got no --workloads, want some of {', '.join(WORKLOADS)}")
    return names


def paths_of(option: str, words: Iterable[str]) -> dict[str, str]:
    """{peer: path} of PEER=PATH words; every peer is known and every path is there."""
    paths = {}
    for word in words:
        name, _, path = word.partition("=")
        if name not in PEERS or not path:
            raise BadRequest(f"got {option} {word!r}, want PEER=PATH, a PEER of {', '.join(PEERS)}")
        if not Path(path).exists():
            raise BadRequest(f"got {option} {word!r}: there is no {path}")
        paths[name] = path
    return paths


def find_engines(wishes: Wishes, children: Children, as_folder: Callable[[], Path]) -> Found:
    """`as_folder` writes the model for engines that read Hugging Face folders; called if needed."""
    found = Found()
    for name in OURS:
        found.places[name] = Place(str(wishes.model), None, "")
    for name in wishes.against:
        kind, python = PEERS[name], wishes.pythons.get(name)
        version = children.version(name, python)
        if version is None:
            found.missing[name] = f"not installed: {kind.install}"
        elif name in wishes.models:
            found.places[name] = Place(wishes.models[name], python, version)
        elif kind.form == "folder":
            found.places[name] = Place(str(as_folder()), python, version)
        elif wishes.model.suffix == ".gguf":
            found.places[name] = Place(str(wishes.model), python, version)
        else:
            found.missing[name] = f"reads GGUF files: name one with --model-of {name}=FILE"
    return found
