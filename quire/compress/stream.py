"""Stream: calibration text on its way through the engine's own decoder, one block at a time.

Only one block has weights. `observe` looks at the inputs of its products, `advance` replaces the
stream by what the block makes of it. Attention is the reference backend's, products are torch's, so
it runs on any device. Every sequence is one page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn.select import select_backend
from quire.compress.seen import MAX_ROWS, Catch, Caught, Needs, Seen, Watch
from quire.forward import Batch, LayerContext
from quire.kv.forms import FLOAT32
from quire.kv.groups import layer_groups
from quire.kv.spec import CacheSpec
from quire.load.checkpoint import Checkpoint
from quire.load.loader import target_of
from quire.memory.pool import PagePool
from quire.models.decoder import Block, Decoder, block_kind, heads_of
from quire.models.kv_cache import kv_shape
from quire.models.names import Target
from quire.models.spec import ModelSpec
from quire.nn.moe import SparseMLP
from quire.nn.ops import LinearKernel
from quire.ops.expert_loop import ExpertLoop
from quire.ops.torch_ops import TorchOps
from quire.quant.weight import Dense

TOKENS_A_CALL = 4096
GRAM_BYTES = 8 << 30  # of all Hessians at once; a block of many experts takes several runs


class Part(NamedTuple):
    """Some sequences: what blocks have added up, and what the last one left to be added."""

    x: Tensor  # [tokens, hidden]
    residual: Tensor | None


class Slot(NamedTuple):
    """Where a product's kernel is kept."""

    kernel: LinearKernel
    put: Callable[[LinearKernel], None]
    num_in: int


class Stream:
    def __init__(self, spec: ModelSpec, ids: Tensor, device: torch.device) -> None:
        """`ids` is [sequences, length]."""
        self.spec, self.device, self.length = spec, device, ids.shape[1]
        self.heads = heads_of(spec, self.length)
        self.model = Decoder(spec, self.heads, self.length, torch.float32, device)
        self.ops = TorchOps()
        _, self.backend = select_backend("reference", device, torch.float32, self.heads)
        self._ids = ids.split(max(1, TOKENS_A_CALL // self.length))
        self._ropes = self.model.ropes()
        self._parts: list[Part] = []
        cache = CacheSpec(kv_shape(spec), layer_groups((), 1), self.length, FLOAT32)
        self._pool = PagePool(self.backend, self.heads, cache, len(self._ids[0]), device)

    def enter(self, embed: Tensor, positions: Tensor | None) -> None:
        """From tokens to what the first block reads."""
        self._parts = []
        for ids in self._ids:
            x = F.embedding(ids.flatten(), embed).to(self.device, torch.float32)
            if positions is not None:
                x = x + positions[: self.length].to(x).repeat(len(ids), 1)
            self._parts.append(Part(x * self.model.embed_scale, None))

    def load(self, layer: int, stored: Checkpoint, names: Mapping[str, Target]) -> None:
        """Give the block the weights that a checkpoint has for it."""
        self.unload(layer)
        parameters, prefix = self.model.parameters(), f"layers.{layer}."
        for theirs in stored.names():
            target = target_of(names, theirs)
            if target is None or not target.name.startswith(prefix):
                continue
            parameter = parameters[target.name]
            weight = stored.packed(theirs) if parameter.can_pack else None
            if weight is None:
                tensor = stored.read(theirs)
                weight = Dense(tensor.t() if target.transposed else tensor)
            parameter.put(target.part, weight.dequantize(), weight.inputs)
        self._finish(layer)

    def put(self, layer: int, tensors: Mapping[str, Tensor], names: Mapping[str, Target]) -> None:
        """Give the block these weights, under their stored names."""
        self.unload(layer)
        parameters = self.model.parameters()
        for theirs, tensor in tensors.items():
            target = names[theirs]
            parameters[target.name].put(target.part, tensor.t() if target.transposed else tensor)
        self._finish(layer)

    def _finish(self, layer: int) -> None:
        block = self.model.blocks[layer]
        block.attn.finish(self.ops, self._ropes)
        block.mlp.finish(self.ops)
        for norm in block.norms().values():
            norm.finish(self.ops)

    def unload(self, layer: int) -> None:
        """Let go of the block's weights."""
        sizes = (self.spec, self.heads, layer, torch.float32, self.device)
        self.model.blocks[layer] = block_kind(self.spec)(*sizes)

    def observe(self, layer: int, needs: Needs) -> dict[str, Seen]:
        """What the inputs of each site are, by its name."""
        found: dict[str, Seen] = {}
        block = self.model.blocks[layer]
        for some in _portions(_slots(block), needs):
            for name, slot in some.items():
                found[name] = self._new(slot.num_in, needs)
                slot.put(Watch(slot.kernel, found[name]))
            for at, part in zip(self._contexts(), self._parts, strict=True):
                _run(block, part, at)
            for slot in some.values():
                slot.put(slot.kernel)
        return found

    def inputs(self, layer: int, site: str) -> Iterator[Tensor]:
        """What a site reads of each part of the text, [tokens, in]."""
        block = self.model.blocks[layer]
        slot = _slots(block)[site]
        for at, part in zip(self._contexts(), self._parts, strict=True):
            slot.put(catch := Catch(slot.num_in, self.device))
            with suppress(Caught):
                _run(block, part, at)
            slot.put(slot.kernel)
            yield catch.rows

    def advance(self, layer: int) -> None:
        for i, at in enumerate(self._contexts()):
            self._parts[i] = _run(self.model.blocks[layer], self._parts[i], at)

    def states(self) -> list[Tensor]:
        """The stream as it is now, [tokens, hidden] for each part of the text."""
        return [p.x if p.residual is None else p.x + p.residual for p in self._parts]

    def observe_head(self, norm: Tensor, bias: Tensor | None, needs: Needs) -> Seen:
        """What the last norm gives the head."""
        parameters = self.model.parameters()
        parameters["norm.weight"].put(None, norm)
        if bias is not None:
            parameters["norm.bias"].put(None, bias)
        self.model.norm.finish(self.ops)
        seen = self._new(self.spec.hidden_size, needs)
        for part in self._parts:
            seen.add(self.model.norm(part.x, part.residual)[0])
        return seen

    def _new(self, num_in: int, needs: Needs) -> Seen:
        return Seen(num_in, needs, -(-MAX_ROWS // len(self._ids)), self.device)

    def _contexts(self) -> Iterator[LayerContext]:
        for ids in self._ids:
            plan = self.backend.plan(_batch(ids, self.device), self.heads)
            yield LayerContext(self.backend, self._pool.layer(0), plan)


def _run(block: Block, part: Part, at: LayerContext) -> Part:
    q, residual = block.store(part.x, part.residual, at)
    return Part(*block.feed_forward(block.attn.attend(q, at), residual))


def _batch(ids: Tensor, device: torch.device) -> Batch:
    """Whole sequences of one length, each in the page of its number."""
    num_seqs, length = ids.shape
    tokens = torch.arange(num_seqs * length, device=device)
    numbers = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    lens = np.full(num_seqs, length, dtype=np.int32)
    return Batch(
        input_ids=ids.flatten().to(device),
        positions=tokens % length,
        slots=tokens,
        query_starts=numbers * length,
        context_lens=torch.full_like(numbers[1:], length),
        rows=numbers[:-1],
        page_table=numbers[:-1].unsqueeze(1),
        page_size=length,
        host_query_lens=lens,
        host_context_lens=lens,
        host_prompt_lens=lens,  # latents are expanded, so that their product has inputs to see
    )


def _slots(block: Block) -> dict[str, Slot]:
    """Every product of a block, by its site."""
    found: dict[str, Slot] = {}
    for name, linear in (block.attn.linears() | block.mlp.linears()).items():
        assert linear.kernel is not None
        put = _attribute(linear)
        found[name] = Slot(linear.kernel, put, linear.weight.shape[1])
    if isinstance(block.mlp, SparseMLP):
        loop = block.mlp.experts.kernel
        assert isinstance(loop, ExpertLoop), "experts are not multiplied one by one"
        for name, kernels in (("up", loop.up), ("down", loop.down)):
            num_in = block.mlp.experts.parameters[name].shape[-1]
            for e, kernel in enumerate(kernels):
                found[f"experts.{e}.{name}"] = Slot(kernel, _item(kernels, e), num_in)
    return found


def _attribute(linear: object) -> Callable[[LinearKernel], None]:
    return lambda kernel: setattr(linear, "kernel", kernel)


def _item(kernels: list[LinearKernel], at: int) -> Callable[[LinearKernel], None]:
    return lambda kernel: kernels.__setitem__(at, kernel)


def _portions(slots: dict[str, Slot], needs: Needs) -> Iterator[dict[str, Slot]]:
    """All sites, so many at a time that what is kept of them fits memory."""
    some: dict[str, Slot] = {}
    held = 0
    for name, slot in slots.items():
        size = 4 * slot.num_in**2 if needs.gram else 0
        if some and held + size > GRAM_BYTES:
            yield some
            some, held = {}, 0
        some[name] = slot
        held += size
    yield some
