"""Teacher: what the target thinks of a text. On a CPU it is read once and kept.

There it runs on the engine's own packed kernels, so a pupil learns from the very numbers it will
draft for. Each sequence is read alone and its hidden states are rounded to bf16, whether they go to
disk or not: they are the same bits in every run. Logits are made of the final ones when asked for.
On other devices a teacher keeps nothing (`live_teacher.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.compress.safetensors_file import write_tensors
from quire.compress.source import HEAD, Source
from quire.config import EngineArgs
from quire.distill.decoder import PAGE_SIZE, check_trainable, streams
from quire.distill.leaves import LeafOps
from quire.engine.cpu_path import CpuPath
from quire.errors import CheckpointError
from quire.load.loader import load_weights
from quire.load.safetensors_checkpoint import Shard
from quire.load.wish import Wish
from quire.models.decoder import Decoder, heads_of
from quire.ops.select import ops_of

KEPT = torch.bfloat16
ROWS_AT_ONCE = 256  # of logits


class States(NamedTuple):
    """What the target thinks of a sequence, or of several in one tensor each, padded behind."""

    final: Tensor  # [length, hidden] after the last norm
    taps: Tensor  # [length, taps, hidden]: what the tapped blocks read
    best: Tensor  # [length] the likeliest token behind each position


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is drafted for: its files, and a decoder to read with."""

    source: Source
    model: Decoder
    device: torch.device

    @staticmethod
    def open(name: str, device: torch.device, threads: int | None = None) -> Target:
        """Raises CheckpointError or NotSupported."""
        source = Source.open(name)
        check_trainable(source.spec, name)
        spec = source.spec
        args = EngineArgs(model=name, device=device.type, num_threads=threads)
        cpu = CpuPath.of(args, device)
        with torch.inference_mode():
            heads = heads_of(spec, PAGE_SIZE)
            dtype = torch.float32 if device.type == "cpu" else KEPT
            model = Decoder(spec, heads, spec.max_positions, dtype, device)
            load_weights(model, source.checkpoint, source.names, Wish(cpu.keeps_packed))
            model.finish(LeafOps() if cpu.library is None else ops_of(device, cpu.library))
        return Target(source, model, device)

    def tensor(self, ours: str) -> Tensor:
        """A weight in no block by our name, in fp32: the embedding's rows are the head's as well
        where both are one."""
        spec = self.source.spec
        ours = "embed.weight" if ours == HEAD and spec.tied else ours
        for name in self.source.of_layer(None):
            if self.source.places[name].target.name == ours:
                return self.source.read(name).to(self.device, torch.float32)
        raise CheckpointError(f"the target has no {ours}")

    def logits(self, final: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab] in fp32."""
        with torch.inference_mode():
            made = self.model.logits(final.to(self.device, self.model.dtype))
        # A copy in any case: autograd may keep it, which it may not of inference tensors.
        return made.to(torch.float32, copy=True)


def padded(rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[length, ...] of several lengths -> [seqs, length, ...], 0 behind each."""
    length = max(len(row) for row in rows)
    made = torch.zeros(len(rows), length, *rows[0].shape[1:], dtype=dtype)
    for place, row in zip(made, rows, strict=True):
        place[: len(row)] = row
    return made


class Teacher(Protocol):
    target: Target

    def read(self, named: Mapping[str, Sequence[int]]) -> States:
        """[seqs, length, ...] on the target's device; a name always stands for the same ids."""
        ...


class KeptTeacher:
    def __init__(self, target: Target, taps: Sequence[int], folder: Path, limit: int) -> None:
        """Keeps at most `limit` bytes of states in the folder."""
        self.target, self.taps, self.folder, self.limit = target, tuple(taps), folder, limit
        folder.mkdir(parents=True, exist_ok=True)
        self._held = sum(file.stat().st_size for file in folder.iterdir())

    def read(self, named: Mapping[str, Sequence[int]]) -> States:
        read, device = [self._states(*item) for item in named.items()], self.target.device
        return States(
            padded([states.final for states in read], torch.float32).to(device),
            padded([states.taps for states in read], torch.float32).to(device),
            padded([states.best for states in read], torch.int64).to(device),
        )

    def _states(self, name: str, ids: Sequence[int]) -> States:
        """Of one sequence."""
        path = self.folder / f"{name}.safetensors"
        if path.exists():
            shard = Shard(path)
            return States(*(shard.read(name) for name in States._fields))
        with torch.inference_mode():
            read = streams(
                self.target.model, torch.tensor([ids], device=self.target.device), self.taps
            )
        final = read.final[0].to("cpu", KEPT)
        taps = read.taps[0].to("cpu", KEPT) if self.taps else final.new_empty(len(final), 0)
        best = [self.target.logits(rows).argmax(-1).cpu() for rows in final.split(ROWS_AT_ONCE)]
        made = States(final, taps, torch.cat(best))
        self._keep(path, made)
        return made

    def _keep(self, path: Path, states: States) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in states)
        if self._held + size > self.limit:
            return
        beside = path.with_name(path.name + ".unfinished")
        try:
            with beside.open("wb") as file:
                self._held += write_tensors(file, states._asdict())
            beside.replace(path)
        except OSError:  # a full disk, say: what is not kept is read again
            beside.unlink(missing_ok=True)
            self.limit = 0
