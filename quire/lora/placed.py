"""An adapter on a model: for each Linear it adapts, what its products get added.

Parts of a fused weight (q|k|v, gate|up) share the input, so their A's are stacked to one product;
each part's B adds to its own columns. On a CPU both products run in fp32 through the device's own
table of operations, so a row's bits depend on that row alone. `bank.py` keeps adapters, `step.py`
applies those of a step. `on_gpu.py` has the weights of a GPU's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.errors import CheckpointError, NotSupported
from quire.load.loader import target_of
from quire.lora.folder import AdapterFolder, LowRank
from quire.models.decoder import Decoder
from quire.models.names import Target
from quire.nn.linear import Linear
from quire.nn.ops import LinearKernel, Ops
from quire.ops.native_ops import NativeOps
from quire.quant.weight import Dense

Columns = tuple[int, int]  # from the first to behind the last
Pairs = Mapping[Columns, LowRank]  # by the columns of a product that they add to


class Part(NamedTuple):
    """Columns of a product that one module adds to."""

    expand: LinearKernel  # B
    inputs: slice  # of what all A's give
    outputs: slice  # of the product
    scale: float


class Delta:
    """What one adapter adds to the products of one Linear."""

    def __init__(self, pairs: Pairs, ops: Ops) -> None:
        downs = [_kept(pair.shrink, ops) for pair in pairs.values()]
        wide = downs[0].dtype if len({down.dtype for down in downs}) == 1 else torch.float32
        self.shrink = ops.linear([Dense(torch.cat([down.to(wide) for down in downs]))], None)
        self.parts: list[Part] = []
        begin = 0
        for columns, pair in pairs.items():
            expand = ops.linear([Dense(_kept(pair.expand, ops))], None)
            inputs = slice(begin, begin + pair.rank)
            self.parts.append(Part(expand, inputs, slice(*columns), pair.scale))
            begin += pair.rank

    def add(self, x: Tensor, y: Tensor, rows: Tensor | None) -> None:
        """To these rows of y [tokens, out], from those of x [tokens, in]; None: to all."""
        shrunk = self.shrink(x if rows is None else x.index_select(0, rows))  # [rows, ranks]
        for part in self.parts:
            added = part.expand((shrunk[:, part.inputs] * part.scale).contiguous())
            into = y[:, part.outputs]
            if rows is None:
                into += added
            else:
                into.index_add_(0, rows, added)


class Adapter(NamedTuple):
    """Weights in memory."""

    deltas: Mapping[Linear, Delta]
    digest: bytes
    rank: int
    num_bytes: int
    slot: int = 0  # in the tables of recorded steps and of GPUs


def place(folder: AdapterFolder, model: Decoder, found: Mapping[Linear, Pairs]) -> Adapter:
    """`found`: what `fitted` found of the folder."""
    assert model.ops is not None, "an adapter before the weights"
    deltas = {linear: Delta(pairs, model.ops) for linear, pairs in found.items()}
    sizes = (t.numel() * t.element_size() for p in folder.modules.values() for t in p.tensors)
    return Adapter(deltas, folder.digest, folder.rank, sum(sizes))


def fitted(
    folder: AdapterFolder, model: Decoder, names: Mapping[str, Target]
) -> dict[Linear, Pairs]:
    """What adds to each linear of this rank, by the columns of its product.

    Raises CheckpointError for a module that does not fit, NotSupported for one not done."""
    linears, found = linears_of(model), dict[Linear, dict[Columns, LowRank]]()
    # What is wrong with a module is found on every stage, not only where its layer is.
    everybody = linears if model.stage.is_only else linears_of(model.of_all_stages())
    for module, pair in folder.modules.items():
        target = target_of(names, f"{module}.weight")
        name = "" if target is None else target.name.removesuffix(".weight")
        linear = linears.get(name) or everybody.get(name)
        if target is None or linear is None:
            raise _refusal(folder, module, target, model)
        begin, end = columns = _columns(linear, target.part)
        num_out, num_in = linear.weight.stored_shape(target.part)
        got = pair.expand.shape[0], pair.shrink.shape[1]
        if got != (num_out, num_in):
            raise CheckpointError(
                f"{folder.path}: {module} has A and B for a weight of {got[0]} x {got[1]}, this"
                f" model's is {num_out} x {num_in}; the adapter is another model's"
            )
        own = found.setdefault(linear, {})
        if any(begin < other_end and other < end for other, other_end in own):
            raise CheckpointError(f"{folder.path}: {module} is there under two names")
        own[columns] = _own_outputs(pair, linear, target.part)
    ours = set(linears.values())
    return {linear: pairs for linear, pairs in found.items() if linear in ours}


def check_model(model: Decoder) -> None:
    """Whether any adapter can be added to its products. Raises NotSupported."""
    if model.device.type not in ("cpu", "cuda"):
        raise NotSupported(
            f"got an adapter on {model.device.type}: low-rank terms are added on CPUs and CUDA;"
            " merge the adapter into the model"
        )
    if model.device.type == "cuda" and model.ranks.has_homes:
        raise NotSupported(
            f"got an adapter on GPUs with data_parallel_size={model.ranks.size}: ranks that have"
            " requests of their own add low-rank terms on CPUs only; use tensor_parallel_size,"
            " or merge the adapter into the model"
        )
    if model.device.type == "cpu" and model.dtype != torch.float32:
        raise NotSupported(
            f"got an adapter with dtype {model.dtype}: low-rank terms are added in fp32, before"
            " results are rounded; leave dtype out"
        )
    if model.spec.mla is not None:
        raise NotSupported(
            f"got an adapter for {model.spec.architecture}, whose attention multiplies by parts of"
            " its weights in turn; merge the adapter into the model"
        )


def linears_of(model: Decoder) -> dict[str, Linear]:
    """What an adapter may add to, by our names."""
    return {
        f"layers.{layer}.{name}": linear
        for layer, block in zip(model.layers, model.blocks, strict=True)
        for name, linear in (block.attn.linears() | block.mlp.linears()).items()
        if name != "router"
    }


def _refusal(
    folder: AdapterFolder, module: str, target: Target | None, model: Decoder
) -> CheckpointError | NotSupported:
    if target is None:
        return CheckpointError(
            f"{folder.path}: {model.spec.architecture} has no module {module}; the adapter is"
            " another model's"
        )
    what = "experts and routers" if "layers." in target.name else "embeddings and heads"
    return NotSupported(
        f"{folder.path}: got an adapter of {module}: {what} are not adapted; train without it, or"
        " merge the adapter into the model"
    )


def _own_outputs(pair: LowRank, linear: Linear, part: str | None) -> LowRank:
    """Where other ranks have some outputs or inputs of the product, what adds to ours."""
    rows, columns = linear.weight.own_rows(part), linear.weight.own_columns
    if columns is not None:
        pair = replace(pair, shrink=pair.shrink[:, columns.begin : columns.end].contiguous())
    return pair if rows is None else replace(pair, expand=pair.expand[rows].contiguous())


def _columns(linear: Linear, part: str | None) -> Columns:
    """Of the product, those of a part."""
    if part is None:
        return 0, linear.weight.shape[0]
    index = linear.weight.parts[part]
    assert isinstance(index, slice), "parts of a Linear are rows of its weight"
    return index.start, index.stop


def _kept(tensor: Tensor, ops: Ops) -> Tensor:
    """As stored, where products take it so."""
    return tensor if isinstance(ops, NativeOps) else tensor.float()
