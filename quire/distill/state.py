"""State: where a run stands, as one file that is replaced as a whole.

The file holds weights, moments, the number of steps done and what was measured in each. It is
written under another name, forced to the disk and renamed: whenever the process dies, the last
whole state is there, and what goes on from it makes the bits of a run that was never stopped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.compress.output import UNFINISHED, Output, told
from quire.compress.safetensors_file import write_tensors
from quire.errors import BadRequest, CheckpointError
from quire.jsonfile import read_object
from quire.load.safetensors_checkpoint import Shard

WORK, ASKED, STATE = "work", "asked.json", "state.safetensors"
HISTORY = "history"


@dataclass(frozen=True, slots=True)
class State:
    tensors: Mapping[str, Tensor]
    history: list[dict[str, Any]] = field(default_factory=list)  # one entry a step

    @property
    def num_steps(self) -> int:
        return len(self.history)


@dataclass(frozen=True, slots=True)
class Desk:
    """The folder a run works in: `work` under the one it writes its result to."""

    folder: Path
    output: Output

    @staticmethod
    def open(out: Path, asked: Mapping[str, Any]) -> Desk:
        """Begin, or go on with what was begun with the same recipe. Raises BadRequest."""
        said = json.loads(json.dumps(asked))
        folder = out / WORK
        if (folder / ASKED).exists():
            if read_object(folder / ASKED) != said:
                raise BadRequest(
                    f"{out} holds what was begun with another target, pupil or schedule; give"
                    " --out a new folder, or the same options as before",
                    param="out",
                )
        elif not _is_free(out):
            raise BadRequest(f"{out} is not empty; give --out a new folder", param="out")
        else:
            with told(folder):
                folder.mkdir(parents=True, exist_ok=True)
            Output(folder, 0).write(ASKED, json.dumps(said, indent=1).encode())
        return Desk(folder, Output(folder, 0))

    def save(self, state: State) -> None:
        told = torch.frombuffer(bytearray(json.dumps(state.history).encode()), dtype=torch.uint8)
        with self.output.writing(self.folder / STATE) as file:
            write_tensors(file, {**state.tensors, HISTORY: told})

    def load(self) -> State | None:
        path = self.folder / STATE
        if not path.exists():
            return None
        shard = Shard(path)
        if HISTORY not in shard.entries:
            raise CheckpointError(f"{path} is no state of a distillation; remove it to begin anew")
        history = json.loads(bytes(shard.read(HISTORY).numpy()))
        tensors = {name: shard.read(name).clone() for name in shard.entries if name != HISTORY}
        return State(tensors, history)


def _is_free(out: Path) -> bool:
    """Empty, or left by a run that died before it had said what it was asked."""
    found = [path for path in out.rglob("*") if path != out / WORK] if out.exists() else []
    return all(path.parent == out / WORK and path.name == ASKED + UNFINISHED for path in found)
