"""Medusa: several small heads on the last hidden state, each for a token further ahead.

The hidden state that token n was drawn from goes through head k, which guesses token n + 1 + k. A
head is residual blocks, x + silu(W x + b), and a product over the vocabulary. Layouts, by tensor
name, with or without "medusa_heads." in front: the authors' own, `{head}.{block}.linear.weight`,
`.bias` and `{head}.{blocks}.weight`; and vLLM's, `blocks.{head}.layers.{block}.weight`, `.bias`,
`lm_heads.{head}.weight` and, where outputs are few, `token_map`. One product serves all heads where
there is one; where there is none, the target's own does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.forward import StateReads
from quire.models.decoder import Decoder, add_linear
from quire.models.heads.vocabulary import DraftVocabulary
from quire.models.names import Target
from quire.nn.linear import Linear
from quire.nn.ops import Ops
from quire.nn.parameter import Parameter

PREFIX = re.compile(r"^(?:medusa_heads?|medusa)\.")
BLOCK = re.compile(r"^(?:blocks\.)?(\d{1,3})\.(?:layers\.)?(\d{1,3})\.(?:linear\.)?(weight|bias)$")
PRODUCT = re.compile(r"^lm_heads\.(\d{1,3})\.weight$")
TOKEN_MAP = "token_map"


@dataclass(frozen=True, slots=True)
class MedusaSpec:
    num_heads: int
    num_blocks: int  # of each head
    has_bias: bool
    num_products: int  # over the vocabulary: one for each head, one for all, or the target's: 0
    hidden_size: int
    vocab_size: int  # outputs of a product

    @staticmethod
    def of(names: Iterable[str], hidden_size: int, vocab_size: int) -> MedusaSpec:
        """What the tensors of these names are. Raises CheckpointError."""
        targets = medusa_names(names).values()
        blocks = [target.name for target in targets if ".blocks." in target.name]
        products = {target.name for target in targets if target.name.endswith(".out.weight")}
        heads = {int(name.split(".")[1]) for name in blocks}
        num_blocks = 1 + max((int(name.split(".")[3]) for name in blocks), default=-1)
        is_whole = heads == set(range(len(heads))) and len(products) in (0, 1, len(heads))
        if not heads or not is_whole:
            raise CheckpointError(
                f"no Medusa heads among the tensors ({len(heads)} heads, {len(products)} products):"
                " want {head}.{block}.linear.weight and {head}.{blocks}.weight, or vLLM's"
                " blocks.{head}.layers.{block}.weight and lm_heads.{head}.weight"
            )
        has_bias = any(name.endswith(".bias") for name in blocks)
        return MedusaSpec(len(heads), num_blocks, has_bias, len(products), hidden_size, vocab_size)


def medusa_names(names: Iterable[str]) -> dict[str, Target]:
    """Stored names -> ours: heads.{head}.blocks.{block}.weight and heads.{head}.out.weight."""
    stripped = {name: PREFIX.sub("", name) for name in names}
    found: dict[str, Target] = {}
    for theirs, name in stripped.items():
        if match := PRODUCT.match(name):
            found[theirs] = Target(f"heads.{match[1]}.out.weight", None, False)
        elif match := BLOCK.match(name):
            head, block, kind = match.groups()
            is_block = "linear" in name or name.startswith("blocks.")
            ours = f"blocks.{block}.{kind}" if is_block else f"out.{kind}"
            found[theirs] = Target(f"heads.{head}.{ours}", None, False)
    return found


class MedusaHeads:
    reads = StateReads()  # of tokens that something is drawn after, which every step has

    def __init__(self, spec: MedusaSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.device = spec, device
        hidden = spec.hidden_size

        def block() -> Linear:
            return Linear(hidden, {"block": hidden}, bias=spec.has_bias, dtype=dtype, device=device)

        def product() -> Linear:
            parts = {"out": spec.vocab_size}
            return Linear(hidden, parts, bias=False, dtype=dtype, device=device)

        self.blocks = [[block() for _ in range(spec.num_blocks)] for _ in range(spec.num_heads)]
        self.products = [product() for _ in range(spec.num_products)]
        self.vocabulary: DraftVocabulary | None = None  # None: the target's
        self._ops: Ops | None = None
        self._target: Decoder | None = None

    @property
    def num_heads(self) -> int:
        return self.spec.num_heads

    def parameters(self) -> dict[str, Parameter]:
        found: dict[str, Parameter] = {}
        for head, blocks in enumerate(self.blocks):
            for i, block in enumerate(blocks):
                add_linear(found, f"heads.{head}.blocks.{i}", block)
        for head, product in enumerate(self.products):
            add_linear(found, f"heads.{head}.out", product)
        return found

    def finish(self, ops: Ops, target: Decoder) -> None:
        """Weights are in; `target` lends its product where the heads have none."""
        self._ops, self._target = ops, target
        for linear in (*self.products, *(block for blocks in self.blocks for block in blocks)):
            linear.finish(ops)

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        """[rows, hidden] -> [rows, tokens] of the token that this head is for."""
        assert self._ops is not None and self._target is not None, (
            "MedusaHeads used before finish()"
        )
        for block in self.blocks[head]:
            hidden = hidden + self._ops.activate(block(hidden), "silu")
        if not self.products:
            return self._target.logits(hidden)
        logits = self.products[min(head, len(self.products) - 1)](hidden)
        return logits if self.vocabulary is None else self.vocabulary.spread(logits)
