"""Decoder: embed -> blocks -> norm -> head; every family here is this wiring with another spec.

Parameters live in plain layers; `parameters()` names them for the loader. `finish()` is called
once when all are loaded: it builds rotary tables and lets each Linear choose its kernel. A block
runs in three parts, so that rows nobody reads can be left out of the last one's attention and
feed-forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.attn.backend import AttnSpec
from quire.dist.cuts import Cut
from quire.dist.ranks import ALONE, Ranks
from quire.dist.stages import EndsOnly, Stage
from quire.errors import NotSupported
from quire.forward import ForwardContext, LayerContext, Stream, Tail
from quire.models.heads.vocabulary import DraftVocabulary
from quire.models.kv_cache import kv_shape
from quire.models.spec import ModelSpec, RopeSpec
from quire.nn.at_home import AtHome
from quire.nn.attention import Attention, NormedStore, Ropes, RopeTables
from quire.nn.embed import Embedding
from quire.nn.linear import Adapted, Linear
from quire.nn.mla import MlaAttention
from quire.nn.mlp import MLP
from quire.nn.moe import SparseMLP
from quire.nn.norm import LayerNorm, RMSNorm
from quire.nn.ops import NormedKernel, Ops
from quire.nn.parameter import Parameter
from quire.nn.rope import rope_tables


class Block:
    """`store`, then `attn.attend` of some or all queries, then `feed_forward` of the same rows.

    The stream is what blocks add to; what one adds last is left to the next one's norm to add.
    """

    def __init__(
        self,
        spec: ModelSpec,
        heads: AttnSpec,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        attention = Attention if spec.mla is None else MlaAttention
        self.attn_norm = norm_of(spec, dtype, device)
        inner = attention(spec, heads, layer, dtype, device, ranks.attention)
        self.attn: Attention | MlaAttention | AtHome = inner
        if ranks.has_homes:
            self.attn = AtHome(inner, spec.hidden_size)
        self.mlp_norm = norm_of(spec, dtype, device)
        mlp = SparseMLP if spec.is_sparse(layer) else MLP
        self.mlp = mlp(spec, dtype, device, ranks=ranks)
        self.scale = spec.residual_scale
        self.norms_first = not spec.norm_after
        self.store_normed: NormedStore | None = None  # norms joined with what reads them
        self.mlp_normed: NormedKernel | None = None

    def norms(self) -> dict[str, RMSNorm | LayerNorm]:
        return {"attn_norm": self.attn_norm, "mlp_norm": self.mlp_norm}

    def store(self, x: Tensor, residual: Tensor | None, at: LayerContext) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens into the cache; returns queries and the stream."""
        if self.store_normed is not None and at.adapted is None:
            return self.store_normed(x, residual, at)
        x, residual = self.attn_norm(x, residual)
        return self.attn.store(x, at), residual

    def feed_forward(
        self, x: Tensor, residual: Tensor, adapted: Adapted | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """From what attention adds: what this block adds last, and the stream to add it to."""
        x, residual = self._fed(self._scaled(x), residual, adapted)
        return self._scaled(x), residual

    def _fed(self, x: Tensor, residual: Tensor, adapted: Adapted | None) -> tuple[Tensor, Tensor]:
        """What the block adds for the norm of the sum, and that sum."""
        if self.mlp_normed is not None and adapted is None:
            return self.mlp_normed(x, residual)
        x, residual = self.mlp_norm(x, residual)
        return self.mlp(x, adapted), residual

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1.0 else x * self.scale

    def finish(self, ops: Ops, ropes: Ropes) -> None:
        self.attn.finish(ops, ropes)
        self.mlp.finish(ops)
        for norm in self.norms().values():
            norm.finish(ops)
        if self.norms_first:
            self.store_normed = self.attn.after(self.attn_norm)
            self.mlp_normed = self.mlp.after(self.mlp_norm)

    def parameters(self, at: str) -> dict[str, Parameter]:
        """Every tensor of the block; `at` begins their names."""
        found: dict[str, Parameter] = {}
        for name, norm in (self.norms() | self.attn.norms()).items():
            add_norm(found, at + name, norm)
        for name, linear in (self.attn.linears() | self.mlp.linears()).items():
            add_linear(found, at + name, linear)
        for name, own in self.attn.parameters().items():
            found[at + name] = own
        if isinstance(self.mlp, SparseMLP):
            for name, own in self.mlp.parameters().items():
                found[at + name] = own
        else:
            for name, norm in self.mlp.norms().items():
                add_norm(found, at + name, norm)
        return found


class NormAfterBlock(Block):
    """Reads the stream as it is and norms what it adds (OLMo 2)."""

    def store(self, x: Tensor, residual: Tensor | None, at: LayerContext) -> tuple[Tensor, Tensor]:
        return self.attn.store(x, at), x

    def feed_forward(
        self, x: Tensor, residual: Tensor, adapted: Adapted | None = None
    ) -> tuple[Tensor, Tensor | None]:
        added, _ = self.attn_norm(x, None)
        x = residual + added
        added, _ = self.mlp_norm(self.mlp(x, adapted), None)
        return x + added, None


class NormBothBlock(Block):
    """Norms what it reads and what it adds (Gemma)."""

    def __init__(
        self,
        spec: ModelSpec,
        heads: AttnSpec,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(spec, heads, layer, dtype, device, ranks)
        self.attn_out_norm = norm_of(spec, dtype, device)
        self.mlp_out_norm = norm_of(spec, dtype, device)

    def norms(self) -> dict[str, RMSNorm | LayerNorm]:
        outer = {"attn_out_norm": self.attn_out_norm, "mlp_out_norm": self.mlp_out_norm}
        return super().norms() | outer

    def feed_forward(
        self, x: Tensor, residual: Tensor, adapted: Adapted | None = None
    ) -> tuple[Tensor, Tensor | None]:
        x, _ = self.attn_out_norm(x, None)
        x, residual = self._fed(x, residual, adapted)
        x, _ = self.mlp_out_norm(x, None)
        return x, residual


def norm_of(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> RMSNorm | LayerNorm:
    if spec.norm == "rms":
        return RMSNorm(spec.hidden_size, spec.norm_eps, dtype, device, spec.norm_offset)
    return LayerNorm(spec.hidden_size, spec.norm_eps, dtype, device)


def block_kind(spec: ModelSpec) -> type[Block]:
    if spec.norm_both:
        return NormBothBlock
    return NormAfterBlock if spec.norm_after else Block


def heads_of(spec: ModelSpec, page_size: int) -> AttnSpec:
    """What is stored of a token, the same in all layers."""
    kept, value_dim = kv_shape(spec), spec.mla.kv_rank if spec.mla else None
    numbers = spec.num_heads, kept.num_heads, kept.width, spec.head_dim**-0.5, page_size
    return AttnSpec(*numbers, value_dim=value_dim)


def spec_of_rank(spec: ModelSpec, ranks: Ranks) -> ModelSpec:
    """With the heads that this rank has."""
    ranks = ranks.attention
    if ranks.is_alone:
        return spec
    num_kv_heads = spec.num_heads if spec.mla else spec.num_kv_heads
    own = ranks.heads(spec.num_heads, num_kv_heads)
    return replace(spec, num_heads=own.q.size, num_kv_heads=own.kv.size)


class Decoder:
    def __init__(
        self,
        spec: ModelSpec,
        heads: AttnSpec,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        """`heads` are those of this rank, `spec` is the whole model's; of its layers this has those
        of the rank's stage, and embedding and head where that is the first."""
        self.spec, self.ranks = spec_of_rank(spec, ranks), ranks
        self._spec, self._heads = spec, heads
        self.stage, self.layers = ranks.stage, ranks.stage.layers(spec.num_layers)
        self.num_positions, self.dtype, self.device = num_positions, dtype, device
        self._loads: Tensor | None = None
        self.ops: Ops | None = None
        hidden = spec.hidden_size
        self.embed = Embedding(spec.vocab_size, hidden, dtype, device, ranks)
        self.vocab = ranks.spread_rows(spec.vocab_size)
        # Rounded as Gemma's own is; the other families' are whole numbers.
        self.embed_scale = torch.tensor(spec.embed_scale, dtype=dtype).item()
        self.positions = (
            None
            if spec.rope is not None or not self.stage.is_first
            else torch.empty(spec.max_positions, hidden, dtype=dtype, device=device)
        )
        kind = block_kind(spec)
        self.blocks = [kind(spec, heads, i, dtype, device, ranks) for i in self.layers]
        self.norm = norm_of(spec, dtype, device)

        def linear(name: str, width: int | Cut) -> Linear:
            return Linear(hidden, {name: width}, bias=False, dtype=dtype, device=device)

        self.head = linear("head", self.vocab.own)
        self.score = linear("score", spec.num_labels) if spec.num_labels else None
        self.vocabulary: DraftVocabulary | None = None  # where its head names some tokens only

    def forward(self, ctx: ForwardContext, tail: Tail | None = None) -> Tensor:
        """Hidden states after the last norm, [tokens, hidden]; with a tail of its tokens alone."""
        return self.read_out(*self.queries(ctx), ctx, tail)

    def queries(self, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Up to the last layer's `store`: its queries, and the stream."""
        x, residual = self._through(self.blocks[:-1], ctx)
        q, residual = self.blocks[-1].store(x, residual, ctx.at(self.layers[-1]))
        if ctx.taps is not None:
            ctx.taps.take(self.layers[-1], residual)
        return q, residual

    @property
    def stream_parts(self) -> int:
        """Tensors that a stream between two blocks consists of."""
        return 1 if self.spec.norm_after else 2

    def pass_on(self, ctx: ForwardContext) -> Stream:
        """What the next stage goes on with."""
        return self._through(self.blocks, ctx)

    def _through(self, blocks: Sequence[Block], ctx: ForwardContext) -> Stream:
        x, residual = self._enter(ctx)
        for layer, block in zip(self.layers, blocks, strict=False):
            at = ctx.at(layer)
            # One name for all, so that no tensor outlives its use: they are large.
            x, residual = block.store(x, residual, at)
            if ctx.taps is not None:
                ctx.taps.take(layer, residual)
            x = block.attn.attend(x, at)
            x, residual = block.feed_forward(x, residual, at.adapted)
        return x, residual

    def _enter(self, ctx: ForwardContext) -> Stream:
        if ctx.incoming is not None:
            return ctx.incoming
        batch = ctx.batch
        x = self.embed(batch.input_ids)  # a plain launch: see `kernels/early.py`
        if self.positions is not None:
            assert self.ops is not None, "Decoder used before finish()"
            x = self.ops.add_positions(x, batch.positions, self.positions)
        return (x if self.embed_scale == 1.0 else x * self.embed_scale), None

    def read_out(
        self, q: Tensor, residual: Tensor, ctx: ForwardContext, tail: Tail | None
    ) -> Tensor:
        """What `forward` returns, from what `queries` does."""
        last, at = self.blocks[-1], ctx.at(self.layers[-1])
        if tail is not None:
            if tail.is_empty:
                return residual[:0]
            adapted = None if at.adapted is None else at.adapted.of_tail()
            at = replace(at, plan=tail.plan(), adapted=adapted, homes=tail.homes)
            # Plain launches: attention of single queries reads all but the newest keys early.
            q, residual = tail.of_queries(q), tail.of(residual)
        x, stream = last.feed_forward(last.attn.attend(q, at), residual, at.adapted)
        x, stream = self.norm(x, stream)
        if ctx.taps is not None:
            ctx.taps.take(self.layers[-1] + 1, stream)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[samples, hidden] -> [samples, vocab]."""
        logits = self.vocab.gather(self.head(hidden))
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        if (cap := self.spec.logit_softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits if self.vocabulary is None else self.vocabulary.spread(logits)

    def classify(self, hidden: Tensor) -> Tensor:
        """[samples, hidden] -> [samples, labels]."""
        assert self.score is not None, f"{self.spec.architecture} has no classification head"
        return self.score(hidden)

    def finish(self, ops: Ops) -> None:
        self.ops, ropes = ops, self.ropes()
        for block in self.blocks:
            block.finish(ops, ropes)
        self.norm.finish(ops)
        if not self.stage.is_first:
            return
        if self.spec.tied:
            self.head.kernel = self.embed.finish_tied(ops)
        else:
            self.embed.finish(ops)
            self.head.finish(ops)
        if self.score is not None:
            self.score.finish(ops)

    def of_all_stages(self) -> Decoder:
        """With everybody's layers, as shapes without memory."""
        at = self.num_positions, self.dtype, torch.device("meta")
        return Decoder(self._spec, self._heads, *at, replace(self.ranks, stage=Stage()))

    def ends(self) -> Decoder:
        """Embedding and output alone, whole on this rank; nothing is loaded so far."""
        at = self.num_positions, self.dtype, self.device
        return Decoder(self._spec, self._heads, *at, Ranks(stage=EndsOnly(0, 2)))

    def ropes(self) -> Ropes:
        """Rotations of its layers, as `Attention.finish` takes them."""
        return ropes_of(self.spec, self.num_positions, self.device)

    def count_expert_loads(self) -> Tensor:
        """[sparse layers, experts] tokens each expert got, counted from now on; again: from zero.

        Graphs keep what they were captured with, so the first call comes before the first step.
        Rows that pad a graph's batch and those of the run before its capture are counted like all
        others. Where a step has a tail, the last layer's experts get, and count, its rows only:
        compare experts of a layer, not layers.
        """
        sparse = [block.mlp for block in self.blocks if isinstance(block.mlp, SparseMLP)]
        if self.spec.moe is None or not sparse:
            raise NotSupported(f"{self.spec.architecture} has no experts whose loads to count")
        if self._loads is None:
            shape = (len(sparse), self.spec.moe.router.num_experts)
            self._loads = torch.empty(shape, dtype=torch.int64, device=self.device)
            for mlp, loads in zip(sparse, self._loads, strict=True):
                mlp.loads = loads
        return self._loads.zero_()

    def linears(self) -> list[Linear]:
        """Every product of the model but those of experts."""
        found = [self.head] if self.score is None else [self.head, self.score]
        for block in self.blocks:
            found += [*block.attn.linears().values(), *block.mlp.linears().values()]
        return found

    def parameters(self) -> dict[str, Parameter]:
        """Every tensor the loader must fill, by our name."""
        found: dict[str, Parameter] = {}
        if self.stage.is_first:
            found["embed.weight"] = self.embed.weight
        if self.positions is not None:
            found["positions.weight"] = Parameter.of(self.positions)
        for i, block in zip(self.layers, self.blocks, strict=True):
            found |= block.parameters(f"layers.{i}.")
        if self.stage.is_last:
            add_norm(found, "norm", self.norm)
        if self.stage.is_first and not self.spec.tied:
            add_linear(found, "head", self.head)
        if self.stage.is_first and self.score is not None:
            add_linear(found, "score", self.score)
        return found


def ropes_of(spec: ModelSpec, num_positions: int, device: torch.device) -> Ropes:
    def tables(rope: RopeSpec | None) -> RopeTables:
        if rope is None:
            return RopeTables(None, None)
        return RopeTables(*rope_tables(rope, num_positions, device))

    full = tables(spec.rope)
    return Ropes(full, full if spec.local_rope is None else tables(spec.local_rope))


def add_norm(found: dict[str, Parameter], name: str, norm: RMSNorm | LayerNorm) -> None:
    found[name + ".weight"] = Parameter.of(norm.weight)
    if isinstance(norm, LayerNorm):
        found[name + ".bias"] = Parameter.of(norm.bias)


def add_linear(found: dict[str, Parameter], name: str, linear: Linear) -> None:
    found[name + ".weight"] = linear.weight
    if linear.bias is not None:
        found[name + ".bias"] = linear.bias
