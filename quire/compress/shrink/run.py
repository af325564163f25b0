"""Shrink: a smaller checkpoint of the same family, from the parts of a model that matter most.

Text runs through the model twice: first to rank layers, heads and channels over all of it, then
block by block to write what stays. `out` and `down`, whose inputs became fewer, are fitted to what
they computed before (least squares, as in `compress/reconstruct.py`). A stream that became narrower
has another mean square, which the norms' weights make up for. The result is an ordinary student for
distillation.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from quire.compress.block import BlockTensors
from quire.compress.files import files_of
from quire.compress.judge import Verdict, mean_error, record, remarks, verdicts_of
from quire.compress.output import Output
from quire.compress.pipeline import Job, Listen, Progress, asked_of, new_stream
from quire.compress.reconstruct import fitted
from quire.compress.seen import Needs, Seen
from quire.compress.shrink.choice import Choice, LayerChoice, cut
from quire.compress.shrink.importance import Importance, measure
from quire.compress.shrink.norms import fit_norms, fit_outer
from quire.compress.shrink.sizes import FIELDS, Sizes
from quire.compress.shrink.smaller_config import smaller_config
from quire.compress.source import Source
from quire.models.registry import spec_of

ENDS = {"out": "q", "down": "mlp"}  # products whose inputs become fewer


class Shrink:
    def __init__(self, job: Job, source: Source, listen: Listen) -> None:
        job.recipe.check((*FIELDS, "reconstruct"))
        self.job, self.source, self.listen = job, source, listen
        self.sizes = Sizes.of(job.recipe, source.spec)
        before = Sizes.before(source.spec)
        self.is_narrower = self.sizes.hidden != before.hidden
        is_thinner = self.sizes.heads != before.heads or self.sizes.mlp != before.mlp
        self.cuts = is_thinner or self.is_narrower  # tensors, besides leaving layers out
        self.refits = is_thinner and job.recipe.reconstruct
        self.output = Output.open(job.out, asked_of(job, source, True), 1 + self.sizes.layers)

    def all(self) -> dict[str, Any]:
        begun = time.perf_counter()
        found, head = self._measure()
        choice = Choice.of(self.sizes, self.source.spec, found)
        config = smaller_config(self.source, self.sizes, choice)
        if 0 not in self.output.records:
            scale = self.source.spec.embed_scale / spec_of(config).embed_scale
            outer = self._outer(choice, head, scale)
            self.output.note(0, self.output.write_shard(0, outer), outer, {})
        self._layers(choice)
        verdicts = verdicts_of(self.output.records.values())
        report: dict[str, Any] = {
            **asked_of(self.job, self.source, True),
            "sizes": asdict(self.sizes),
            "sizes_before": asdict(Sizes.before(self.source.spec)),
            "kept_layers": [layer.old for layer in choice.layers],
            "influence": found.influence,
            "bytes": sum(record["bytes"] for record in self.output.records.values()),
            "seconds": time.perf_counter() - begun,
            "mean_error": mean_error(verdicts),
            "remarks": remarks(verdicts) if verdicts else [],
            "projections": record(verdicts),
        }
        self.output.finish(config, files_of(self.source), report)
        return report

    # ------------------------------------------------------------ steps

    def _measure(self) -> tuple[Importance, Seen]:
        """Also what the head reads."""
        stream = new_stream(self.job, self.source)
        found = measure(self.source, stream, self.job.device)
        by_ours = {self.source.places[n].target.name: n for n in self.source.places}
        bias = by_ours.get("norm.bias")
        head = stream.observe_head(
            self.source.read(by_ours["norm.weight"]),
            None if bias is None else self.source.read(bias),
            Needs(rows=True),
        )
        weight = self.source.read(by_ours.get("head.weight", by_ours["embed.weight"]))
        found.add_readers(head.energy * weight.to(self.job.device).float().square().sum(0))
        return found, head

    def _layers(self, choice: Choice) -> None:
        needs_text = self.refits or self.is_narrower
        stream = new_stream(self.job, self.source) if needs_text else None
        by_old = {layer.old: i for i, layer in enumerate(choice.layers)}
        for old in range(self.source.spec.num_layers):
            new = by_old.get(old)
            is_done = new is None or new + 1 in self.output.records
            seen: dict[str, Seen] = {}
            if stream is not None:
                stream.load(old, self.source.checkpoint, self.source.names)
                if not is_done:
                    seen = stream.observe(old, Needs(rows=True, gram=self.refits))
                stream.advance(old)
                stream.unload(old)
            if new is None:
                continue
            if not is_done:
                self._write(new, choice.layers[new], seen)
            error = mean_error(verdicts_of([self.output.records[new + 1]]))
            what = f"block {old} as {new}"
            told = error if self.refits else None
            self.listen(Progress(new + 1, self.sizes.layers, what, told, is_done))

    def _write(self, new: int, layer: LayerChoice, seen: dict[str, Seen]) -> None:
        block = self.source.block(layer.old, frozenset(), self.job.device)
        if self.is_narrower:
            fit_norms(block, seen, layer.kept["hidden"], self.source.spec)
        verdicts = self._refit(block, layer, seen) if self.refits else {}
        tensors: dict[str, Tensor] = {}
        for name, tensor in (block.tensors | block.changed).items():
            target = block.targets[name]
            kept = dict(layer.kept)
            if name in block.changed:  # its columns are chosen already
                kept |= dict.fromkeys(ENDS.values(), torch.arange(tensor.shape[-1]))
            parameter = self.source.parameters[target.name]
            smaller = cut(tensor, target, parameter, kept) if self.cuts else tensor
            tensors[self._renamed(name, layer.old, new)] = smaller.to("cpu", self.source.dtype)
        size = self.output.write_shard(new + 1, tensors)
        self.output.note(new + 1, size, tensors, {"verdicts": record(verdicts)})

    def _refit(
        self, block: BlockTensors, layer: LayerChoice, seen: dict[str, Seen]
    ) -> dict[str, Verdict]:
        """Ends of attention and of the feed-forward block on the inputs that are left."""
        found = {}
        for matrix in block.matrices:
            if (kind := ENDS.get(matrix.site)) is None:
                continue
            own, weight = seen[matrix.site], block.tensors[matrix.name]
            assert own.gram is not None
            at = layer.kept[kind].to(weight.device)
            cross, start = own.gram[:, at], weight[:, at].contiguous()
            made = fitted(start, weight @ cross, own.gram[at][:, at].contiguous())
            block.changed[matrix.name] = made
            moved = own.rows[:, at] @ made.t() - own.rows @ weight.t()
            whole = (own.rows @ weight.t()).square().sum().clamp(min=1e-30)
            error = (moved.square().sum() / whole).item()
            largest = (made.abs().max() / weight.abs().max().clamp(min=1e-30)).item()
            found[matrix.module] = Verdict(error, largest, None, own.num_tokens)
        return found

    def _outer(self, choice: Choice, head: Seen, embed_scale: float) -> dict[str, Tensor]:
        names = self.source.of_layer(None)
        targets = {name: self.source.places[name].target for name in names}
        tensors = {name: self.source.read(name).float() for name in names}
        spec = self.source.spec
        if self.is_narrower:
            fit_outer({targets[n].name: t for n, t in tensors.items()}, head, choice.hidden, spec)
            by_ours = {targets[name].name: tensor for name, tensor in tensors.items()}
            by_ours["embed.weight"].mul_(embed_scale)  # a family may scale it by its width
            if "head.weight" not in by_ours:
                norm = by_ours["norm.weight"]
                norm.copy_((norm + spec.norm_offset) / embed_scale - spec.norm_offset)
        return {
            name: cut(
                tensor,
                targets[name],
                self.source.parameters[targets[name].name],
                {"hidden": choice.hidden},
            ).to(self.source.dtype)
            for name, tensor in tensors.items()
        }

    def _renamed(self, name: str, old: int, new: int) -> str:
        """The name that the same tensor has in another layer."""
        target = self.source.places[name].target
        want = target._replace(name=target.name.replace(f"layers.{old}.", f"layers.{new}.", 1))
        words = name.split(".")
        for i, word in enumerate(words):
            if word == str(old):
                made = ".".join([*words[:i], str(new), *words[i + 1 :]])
                if self.source.names.get(made) == want:
                    return made
        raise AssertionError(f"{name} has no name in layer {new}")
