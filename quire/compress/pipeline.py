"""The pipeline: one block after the other is read, observed, changed, written and left behind.

Calibration text runs through the blocks as they were *written*: what the next block sees is what
it will see when the model runs, and taking up a run that died gives the same bits. Memory holds one
block and the text. What is done to a block is the pass's (`passes/`), how weights that are left are
fitted `reconstruct.py`'s, what is written where `output.py`'s. GGUF files are `gguf_export.py`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.compress.block import BlockTensors, Matrix
from quire.compress.calibration import Calibration
from quire.compress.files import config_of, files_of
from quire.compress.judge import (
    Verdict,
    judge,
    mean_error,
    record,
    remarks,
    share_of_zeros,
    spared_of,
    spared_remarks,
    verdicts_of,
)
from quire.compress.methods import pass_of
from quire.compress.output import Output
from quire.compress.passes.recipe import Kept, Pass, Recipe
from quire.compress.reconstruct import Reconstruction
from quire.compress.seen import Seen
from quire.compress.source import HEAD, Source
from quire.compress.stream import Stream
from quire.errors import NotSupported
from quire.load.checkpoint import Checkpoint
from quire.load.safetensors_checkpoint import SafetensorsCheckpoint, Shard
from quire.load.unpack import readable


@dataclass(frozen=True, slots=True)
class Job:
    """All that was asked for."""

    model: str
    out: Path
    recipe: Recipe
    calibration: Calibration
    keep: tuple[str, ...]
    device: torch.device


@dataclass(frozen=True, slots=True)
class Progress:
    """After each shard."""

    done: int
    total: int
    what: str
    error: float | None  # the mean of its projections
    is_resumed: bool = False


Listen = Callable[[Progress], None]


def compress(job: Job, listen: Listen) -> dict[str, Any]:
    """Writes the model and returns the report. Raises QuireError."""
    source = Source.open(job.model)
    kept = source.kept_modules(list(job.keep))
    if job.recipe.method == "gguf":
        from quire.compress.gguf_export import export

        return export(job, source, kept, listen)
    source.check_layout(job.recipe.method)
    with torch.inference_mode():
        if job.recipe.method == "shrink":
            from quire.compress.shrink.run import Shrink

            return Shrink(job, source, listen).all()
        return Run(job, source, kept, listen).all()


def new_stream(job: Job, source: Source) -> Stream:
    """The calibration text before the first block. Raises BadRequest or NotSupported."""
    if source.tokenizer is None:
        raise NotSupported(
            f"--method {job.recipe.method} calibrates on text, and {source.path} has no tokenizer;"
            " take rtn, nf4, mxfp4, nvfp4 or rtn-fp8, or magnitude with --no-reconstruct, which"
            " need no text"
        )
    if job.calibration.length > source.spec.max_positions:
        raise NotSupported(
            f"got --length {job.calibration.length}, the model has {source.spec.max_positions}"
            " positions"
        )
    stream = Stream(source.spec, job.calibration.sequences(source.tokenizer), job.device)
    outer = {source.places[name].target.name: name for name in source.of_layer(None)}
    at = outer.get("positions.weight")
    stream.enter(source.read(outer["embed.weight"]), None if at is None else source.read(at))
    return stream


def asked_of(job: Job, source: Source, has_text: bool) -> dict[str, Any]:
    """What makes two runs the same one."""
    asked = {"model": str(source.path.resolve()), **asdict(job.recipe)}
    files = [source.path] if source.path.is_file() else sorted(source.path.glob("*.safetensors"))
    asked["files"] = [[file.name, file.stat().st_size] for file in files]
    asked["keep"] = sorted(source.kept_modules(list(job.keep)))
    if has_text:
        text = job.calibration
        asked["calibration"] = [text.sha256, text.samples, text.length]
    return asked


class Run:
    def __init__(self, job: Job, source: Source, kept: frozenset[str], listen: Listen) -> None:
        self.job, self.source, self.kept, self.listen = job, source, kept, listen
        self.work: Pass = pass_of(job.recipe.method)(job.recipe, source.dtype)
        self.modules = {m: s for m, s in source.modules().items() if m not in kept}
        for module, shape in self.modules.items():
            self.work.check(module, shape)
        self.head = next((n for n in source.places if source.places[n].target.name == HEAD), None)
        self.has_head = self.head is not None and self._module(self.head) in self.modules
        self.said = self.work.said(Kept(self._plain_modules(), self.has_head))
        self.num_layers = source.spec.num_layers
        self.output = Output.open(job.out, self._asked(), 1 + self.num_layers + self.has_head)
        self.stream: Stream | None = None
        self.dense: Stream | None = None  # of the blocks as they were

    def all(self) -> dict[str, Any]:
        begun = time.perf_counter()
        if self.work.needs.calibration:
            self.stream = new_stream(self.job, self.source)
            self.dense = new_stream(self.job, self.source) if self.work.reconstructs else None
        if 0 not in self.output.records:
            self._check_room()
            outer = self._outer()
            self.output.note(0, self.output.write_shard(0, outer), outer, {})
        for layer in range(self.num_layers):
            self._layer(layer)
        if self.has_head:
            self._head(self.num_layers + 1)
        verdicts = verdicts_of(self.output.records.values())
        spared = spared_of(self.output.records.values())
        size = sum(r["bytes"] for r in self.output.records.values())
        report: dict[str, Any] = {
            **self._asked(),
            "bytes": size,
            "seconds": time.perf_counter() - begun,
            "mean_error": mean_error(verdicts),
            "zeros": share_of_zeros(verdicts, self.modules),
            "remarks": [*remarks(verdicts), *spared_remarks(spared)],
            "kept": sorted({*self.kept, *spared}),
            "projections": record(verdicts),
        }
        plain = tuple(sorted({*self._plain_modules(), *spared}))
        config = config_of(self.source, self.work.said(Kept(plain, self.has_head)))
        self.output.finish(config, files_of(self.source), report)
        return report

    # ------------------------------------------------------------ steps

    def _layer(self, layer: int) -> None:
        shard = layer + 1
        is_done = shard in self.output.records
        if not is_done:
            self._change_layer(layer, shard)
        if layer + 1 < self.num_layers or self.has_head:
            self._advance(self.stream, layer, self._written(shard))
            self._advance(self.dense, layer, self.source.checkpoint)
        self._tell(shard, f"block {layer}", is_done)

    def _advance(self, stream: Stream | None, layer: int, stored: Checkpoint) -> None:
        if stream is not None:
            stream.load(layer, stored, self.source.names)
            stream.advance(layer)
            stream.unload(layer)

    def _change_layer(self, layer: int, shard: int) -> None:
        seen: dict[str, Seen] = {}
        if self.stream is not None:
            self.stream.load(layer, self.source.checkpoint, self.source.names)
            seen = self.stream.observe(layer, self.work.needs)
            self.stream.unload(layer)
        block = self.source.block(layer, self.kept, self.job.device)
        for site, inputs in seen.items():  # in the order that inputs meet them
            if matrices := [m for m in block.at(site) if m.module in self.modules]:
                inputs.check(matrices[0].module)
        self.work.fold(block, seen, self.source.spec)
        self._act(block, seen)
        if self.stream is not None and self.dense is not None:
            self.dense.load(layer, self.source.checkpoint, self.source.names)
            Reconstruction(self.stream, self.dense).fit(layer, block, self._chosen(block), seen)
            self.dense.unload(layer)
        spared = self.work.spared(self._chosen(block), block, seen)
        block.kept = block.kept.union(spared)
        self._write(shard, block, seen, spared)

    def _act(self, block: BlockTensors, seen: dict[str, Seen]) -> None:
        self.work.act(self._chosen(block), block, seen)

    def _chosen(self, block: BlockTensors) -> list[Matrix]:
        chosen = self.modules.keys() - block.kept
        return [matrix for matrix in block.matrices if matrix.module in chosen]

    def _head(self, shard: int) -> None:
        is_done = shard in self.output.records
        if not is_done:
            seen: dict[str, Seen] = {}
            if self.stream is not None:
                by_ours = {self.source.places[n].target.name: n for n in self.source.places}
                norm = self.source.read(by_ours["norm.weight"])
                bias = by_ours.get("norm.bias")
                added = None if bias is None else self.source.read(bias)
                seen["head"] = self.stream.observe_head(norm, added, self.work.needs)
            head = self.source.head(self.job.device)
            self._act(head, seen)
            self._write(shard, head, seen, {})
        self._tell(shard, "head", is_done)

    def _write(
        self,
        shard: int,
        block: BlockTensors,
        seen: Mapping[str, Seen],
        spared: Mapping[str, float],
    ) -> None:
        tensors: dict[str, Tensor] = {}
        packed = {matrix.name: matrix for matrix in self._chosen(block)}
        for matrix in packed.values():
            stored = self.work.pack(matrix, block, seen.get(matrix.site))
            tensors |= {f"{matrix.module}.{last}": t.cpu() for last, t in stored.items()}
        for name, tensor in block.tensors.items():
            if name not in packed:
                tensors[name] = tensor.to("cpu", self.source.dtype)
        size = self.output.write_shard(shard, tensors)
        written = self._written(shard)
        verdicts: dict[str, Verdict] = {}
        for name, matrix in packed.items():
            near = written.read(name).to(self.job.device).float()
            verdicts[matrix.module] = judge(block.tensors[name], near, seen.get(matrix.site))
        self.output.note(shard, size, tensors, {"verdicts": record(verdicts), "spared": spared})

    def _outer(self) -> dict[str, Tensor]:
        """What is in no block and stays plain."""
        names = [n for n in self.source.of_layer(None) if self._module(n) not in self.modules]
        return {name: self.source.read(name).to(self.source.dtype) for name in names}

    # ------------------------------------------------------------ facts

    def _written(self, shard: int) -> Checkpoint:
        file = Shard(self.output.path(shard))
        stored = SafetensorsCheckpoint(
            config_of(self.source, self.said), dict.fromkeys(file.entries, file)
        )
        return readable(stored, self.job.device)

    def _tell(self, shard: int, what: str, is_resumed: bool) -> None:
        verdicts = verdicts_of([self.output.records[shard]])
        error = mean_error(verdicts) if verdicts else None
        total = self.output.num_shards - 1
        self.listen(Progress(shard, total, what, error, is_resumed))

    def _asked(self) -> dict[str, Any]:
        return asked_of(self.job, self.source, self.work.needs.calibration)

    def _plain_modules(self) -> tuple[str, ...]:
        """Modules that readers would take for quantised ones if nobody told them."""
        routers = {
            self._module(name)
            for name, place in self.source.places.items()
            if place.target.name.endswith((".router.weight", "score.weight"))
        }
        head = {"lm_head"} if not self.has_head else set()
        return tuple(sorted(self.kept | routers | head))

    def _module(self, name: str) -> str:
        return name.removesuffix(".weight")

    def _check_room(self) -> None:
        """By what is surely needed: a pruned weight has eight bits or more, the others what they
        have."""
        total = 0
        for name, place in self.source.places.items():
            size = torch.Size(self.source.parameters[place.target.name].shape_of(place.target.part))
            is_packed = self._module(name) in self.modules
            bits = (self.work.bits or 8) if is_packed else 8 * self.source.dtype.itemsize
            total += size.numel() * bits // 8
        self.output.check_room(total)
