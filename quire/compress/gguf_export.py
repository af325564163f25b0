"""GGUF export: every matrix in one storage type, or the one that stands in for it, in one file.

Blocks are packed one by one into shards, as in `pipeline.py`, so that a run that died goes on; the
file is put together at the end and opened once by our own reader before it gets its name. Heads
and tied embeddings keep six or eight bits, norms, biases and routers all they have.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.compress.ggml_blocks import BLOCK_SIZES, fitting, quantise
from quire.compress.gguf_file import Blob, write_gguf
from quire.compress.gguf_metadata import metadata_of
from quire.compress.judge import Verdict, judge, mean_error, record, remarks, verdicts_of
from quire.compress.output import Output
from quire.compress.pipeline import asked_of
from quire.compress.source import Source
from quire.errors import NotSupported
from quire.load.dequant import dequantize
from quire.load.gguf_checkpoint import GGUFCheckpoint, GGUFTensor, gguf_names
from quire.load.gguf_types import GGML_TYPES
from quire.load.safetensors_checkpoint import Shard
from quire.models.registry import spec_of

if TYPE_CHECKING:
    from quire.compress.pipeline import Job, Listen

KINDS = {kind.name: kind for kind in GGML_TYPES.values()}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# `general.file_type`, which says what most tensors are.
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9}
FILE_TYPES |= {"Q4_K": 14, "Q5_K": 16, "Q6_K": 18, "BF16": 32}
LEAST_OF_HEADS = "Q6_K"


def export(job: Job, source: Source, kept: frozenset[str], listen: Listen) -> dict[str, Any]:
    job.recipe.check(("storage",))
    return Export(job, source, kept, listen).all()


class Export:
    def __init__(self, job: Job, source: Source, kept: frozenset[str], listen: Listen) -> None:
        self.job, self.source, self.kept, self.listen = job, source, kept, listen
        self.kind = job.recipe.storage.upper()
        if self.kind not in FILE_TYPES:
            raise NotSupported(
                f"got --type {job.recipe.storage}, of which {', '.join(FILE_TYPES)} are written"
            )
        self.targets = self._targets()
        self.metadata = metadata_of(source, FILE_TYPES[self.kind])
        self.asked = asked_of(job, source, False)
        self.output = Output.open(job.out, self.asked, 1 + source.spec.num_layers)

    def all(self) -> dict[str, Any]:
        begun = time.perf_counter()
        num_layers = self.source.spec.num_layers
        for shard in range(1 + num_layers):
            is_done = shard in self.output.records
            if not is_done:
                self._write(shard, None if shard == num_layers else shard)
            self._tell(shard, is_done)
        name = f"{self.source.path.stem}-{self.kind}.gguf"
        with self.output.writing(self.job.out / name, self._check) as file:
            write_gguf(file, self.metadata, self._blobs())
        verdicts = verdicts_of(self.output.records.values())
        report: dict[str, Any] = {
            **self.asked,
            "file": name,
            "bytes": (self.job.out / name).stat().st_size,
            "seconds": time.perf_counter() - begun,
            "mean_error": mean_error(verdicts),
            "remarks": remarks(verdicts),
            "kept": sorted(self.kept),
            "projections": record(verdicts),
        }
        self.output.abandon_shards(report)
        return report

    def _targets(self) -> dict[tuple[str, str | None], GGUFTensor]:
        """By what a tensor is to us, which is the same whatever a checkpoint calls it."""
        spec = self.source.spec
        num_experts = spec.moe.router.num_experts if spec.moe else 0
        known = gguf_names(self.source.hf_class, spec.num_layers, num_experts)
        if known is None:
            raise NotSupported(
                f"no GGUF architecture is known here for {self.source.hf_class}; take a safetensors"
                " method such as rtn, gptq or awq"
            )
        return {
            (target.name, target.part): tensor
            for name, tensor in known.items()
            if (target := self.source.names.get(name)) is not None
        }

    # ------------------------------------------------------------ shards

    def _write(self, shard: int, layer: int | None) -> None:
        blobs: dict[str, list[Tensor]] = {}
        stated: dict[str, tuple[str, list[int]]] = {}
        verdicts: dict[str, Verdict] = {}
        for name in self.source.of_layer(layer):
            place = self.source.places[name]
            tensor = self.targets.get((place.target.name, place.target.part))
            if tensor is None:
                raise NotSupported(f"GGUF has no place for {name} of {self.source.path}")
            weight = self._laid_out(self.source.read(name).float(), tensor)
            kind = self._kind_of(name, weight)
            packed = _pack(weight, kind)
            if kind in BLOCK_SIZES:
                near = dequantize(packed, KINDS[kind])
                verdicts[name.removesuffix(".weight")] = judge(weight, near, None)
            blobs.setdefault(tensor.name, []).append(packed)
            lead = [] if tensor.expert is None else [0]
            stated.setdefault(tensor.name, (kind, [*lead, *weight.shape]))
            if tensor.expert is not None:
                stated[tensor.name][1][0] += 1
        tensors = {name: torch.cat([p.flatten() for p in parts]) for name, parts in blobs.items()}
        size = self.output.write_shard(shard, tensors)
        told = {"verdicts": record(verdicts), "stated": stated}
        self.output.note(shard, size, tensors, told)

    def _laid_out(self, weight: Tensor, tensor: GGUFTensor) -> Tensor:
        """As GGUF stores it."""
        spec = self.source.spec
        if tensor.is_transposed:
            return weight.t().contiguous()
        if tensor.is_from_one:
            return weight + 1.0
        if tensor.is_rotary:
            heads = spec.num_heads if ".attn_q." in tensor.name else spec.num_kv_heads
            halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
            return halves.transpose(1, 2).reshape(weight.shape)
        return weight.flatten() if weight.ndim == 2 and len(weight) == 1 else weight

    def _kind_of(self, name: str, weight: Tensor) -> str:
        ours = self.source.places[name].target.name
        if weight.ndim == 1 or ours.endswith(("router.weight", "positions.weight")):
            return "F32"
        if name.removesuffix(".weight") in self.kept:
            return "F32" if self.kind == "F32" else "F16"
        if self.kind in PLAIN:
            return self.kind
        is_head = ours == "head.weight" or (ours == "embed.weight" and self.source.spec.tied)
        kind = LEAST_OF_HEADS if is_head and self.kind != "Q8_0" else self.kind
        return fitting(kind, weight.shape[1])

    # ------------------------------------------------------------ the file

    def _blobs(self) -> list[Blob]:
        found = []
        for shard, told in sorted(self.output.records.items()):
            file = Shard(self.output.path(shard))
            for name, (kind, shape) in told["stated"].items():
                data = _reader(file, name)
                found.append(Blob(name, tuple(shape), KINDS[kind], data))
        return found

    def _check(self, path: Any) -> None:
        """Our own reader finds the same model in it. Raises NotSupported."""
        mine, other = self.source.spec, spec_of(GGUFCheckpoint.open(path).config)
        same = replace(other, dtype=mine.dtype, bos_id=mine.bos_id)
        if same != mine:
            odd = [
                field
                for field in mine.__dataclass_fields__
                if getattr(mine, field) != getattr(same, field)
            ]
            raise NotSupported(
                f"a GGUF file cannot say all that config.json says of this model"
                f" ({', '.join(odd)} would be lost); take a safetensors method"
            )

    def _tell(self, shard: int, is_resumed: bool) -> None:
        from quire.compress.pipeline import Progress

        verdicts = verdicts_of([self.output.records[shard]])
        what = "outside of blocks" if shard == self.source.spec.num_layers else f"block {shard}"
        error = mean_error(verdicts) if verdicts else None
        self.listen(Progress(shard + 1, self.output.num_shards, what, error, is_resumed))


def _pack(weight: Tensor, kind: str) -> Tensor:
    """uint8 [..., row_bytes]."""
    if kind in PLAIN:
        return weight.to(PLAIN[kind]).contiguous().view(torch.uint8)
    return quantise(weight, kind)


def _reader(file: Shard, name: str) -> Any:
    return lambda: file.read(name)
