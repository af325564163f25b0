"""Experts: the weights of all experts of a layer, filled one expert at a time.

A token visits `top_k` experts: a *pair* is one such visit, numbered token by token. A row's bits
depend on that row and its experts alone, and the results of a token's experts are added in the
order of their rank. Which experts a token visits is `moe.py`'s choice, how they multiply the
device's. Where several processes hold the model, each has some experts whole: results come back
unsummed and are added in the same order, to the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from quire.dist.cuts import Cut
from quire.dist.placement import Placement
from quire.dist.ranks import ALONE, Ranks, between, sum_of_all
from quire.nn.ops import ExpertKernel, GateForm, Ops, Visits
from quire.nn.parameter import WHOLE, Index, Kept, Parameter
from quire.quant.weight import Weight


class Experts:
    def __init__(
        self,
        num_experts: int,
        hidden: int,
        ffn: int,
        dtype: torch.dtype,
        device: torch.device,
        gate: GateForm = GateForm(),  # noqa: B008 (a value, never changed)
        has_bias: bool = False,
        ranks: Ranks = ALONE,
        own: Cut | None = None,
    ) -> None:
        """`own`: the experts to have; None: this rank's share."""
        self._sizes = (num_experts, hidden, ffn, dtype, device, gate, has_bias, ranks)
        self.ranks, self.cuts = ranks, ranks.experts(num_experts)
        self.own = own = self.cuts[ranks.rank] if own is None else own
        self.num_experts, self.gate = own.size, gate
        # Others' experts that this rank has as well, and everybody's copies.
        self.copies: dict[int, Experts] = {}
        self.placement = Placement({})
        self._visits: Tensor | None = None  # [experts] since they were last asked for
        # Gate and up of an expert lie behind one another, as in a dense layer's fused weight.
        halves = {
            f"{e}.{name}": (e - own.begin, rows)
            for e in range(own.begin, own.end)
            for name, rows in (("gate", slice(0, ffn)), ("up", slice(ffn, 2 * ffn)))
        }
        wholes = {str(e): e - own.begin for e in range(own.begin, own.end)}
        others = [e for e in range(num_experts) if not own.begin <= e < own.end]
        elsewhere = frozenset(f"{e}{name}" for e in others for name in ("", ".gate", ".up"))
        kept = Kept({WHOLE: own}, elsewhere) if others else None

        def parameter(parts: Mapping[str, Index], *shape: int) -> Parameter:
            size, can_pack = (own.size, *shape), len(shape) == 2
            return Parameter(size, dtype, device, parts, can_pack, kept)

        self.parameters: dict[str, Parameter] = {
            "up": parameter(halves, 2 * ffn, hidden),
            "down": parameter(wholes, hidden, ffn),
        }
        if has_bias:
            self.parameters["up_bias"] = parameter(halves, 2 * ffn)
            self.parameters["down_bias"] = parameter(wholes, hidden)
        self.kernel: ExpertKernel | None = None
        self.ops: Ops | None = None

    def expert(self, name: str, number: int) -> tuple[list[Weight], Tensor | None]:
        """The parts of one expert's "up" or "down", and the bias; counted from our first."""
        label = number + self.own.begin
        parts = [f"{label}.gate", f"{label}.up"] if name == "up" else [str(label)]
        bias = self._bias(name)
        weights = self.parameters[name].weights_of(parts, number)
        return weights, None if bias is None else bias[number]

    def fused(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Our experts' "up" or "down" [experts, out, in] in floats, and their bias."""
        assert not self.parameters[name].packed, "packed experts are multiplied one by one"
        return self.parameters[name].tensor, self._bias(name)

    def _bias(self, name: str) -> Tensor | None:
        found = self.parameters.get(name + "_bias")
        return None if found is None else found.tensor

    def finish(self, ops: Ops) -> None:
        """Weights are in; the kernel has what it needs of them."""
        self.ops, self.kernel = ops, ops.experts(self)
        for parameter in self.parameters.values():
            parameter.release()

    def __call__(self, x: Tensor, visits: Visits, loads: Tensor | None) -> Tensor:
        assert self.kernel is not None, "Experts used before their weights were loaded"
        if self.ranks.is_alone:
            return self.kernel(x, visits, loads)
        make = partial(self._with_others, loads)
        return between(x, make, self.parameters["down"].shape[1], *visits)

    def _owners(self, experts: Tensor) -> Tensor:
        """[pairs] -> [pairs] ranks: the first home or, of an expert that has several, each in
        turn."""
        ends = torch.tensor([cut.end for cut in self.cuts], device=experts.device)
        owners = torch.bucketize(experts, ends, right=True)
        for expert, others in self.placement.copies.items():
            its = (experts == expert).nonzero().squeeze(1)
            if len(its):
                homes = torch.tensor([int(owners[its[0]]), *others], device=experts.device)
                owners[its] = homes[torch.arange(len(its)) % len(homes)]
        return owners

    def _results(self, x: Tensor, tokens: Tensor, experts: Tensor) -> Tensor:
        """What these experts give for these tokens, pair by pair; nothing is summed."""
        made = x.new_empty(len(tokens), self.parameters["down"].shape[1])
        for holder in (self, *self.copies.values()):
            is_its = (experts >= holder.own.begin) & (experts < holder.own.end)
            some = is_its.nonzero().squeeze(1)
            if len(some):
                assert holder.kernel is not None
                numbers = (experts[some] - holder.own.begin)[:, None]
                visits = Visits(numbers, torch.ones(len(some), 1, device=x.device))
                made[some] = holder.kernel(x.index_select(0, tokens[some]), visits, None)
        return made

    def copy_of(self, number: int) -> Experts:
        """One expert without its weights, wherever its home is."""
        return Experts(*self._sizes, own=Cut(number, number + 1, self.cuts[0].total))

    def count_visits(self) -> None:
        """From now on."""
        self._visits = torch.zeros(self.cuts[0].total, dtype=torch.int64)

    def take_visits(self) -> list[int]:
        """Since the last time."""
        assert self._visits is not None, "nobody counts"
        found: list[int] = self._visits.tolist()
        self._visits.zero_()
        return found

    def _with_others(
        self, loads: Tensor | None, x: Tensor, chosen: Tensor, weights: Tensor
    ) -> Tensor:
        """Everybody has all of x, and so knows how many results each rank will give."""
        assert self.ops is not None and self.kernel is not None
        num_tokens, top_k = chosen.shape
        if chosen.dtype.is_floating_point:  # whole numbers where floats would lie
            chosen = chosen.contiguous().view(torch.int32)
        experts = chosen.reshape(-1).long()  # [pairs]
        if loads is not None:
            loads += experts.bincount(minlength=self.cuts[0].total)
        if self._visits is not None:
            self._visits += experts.bincount(minlength=self.cuts[0].total)
        owners = self._owners(experts)
        own = (owners == self.ranks.rank).nonzero().squeeze(1)
        results = self._results(x, own // top_k, experts[own])
        if self.ranks.splits_sums:
            pairs = x.new_zeros(num_tokens * top_k, results.shape[1]).index_copy_(0, own, results)
            ours = self.ops.add_ranks(pairs.view(num_tokens, top_k, pairs.shape[1]), weights)
            return sum_of_all(ours, self.ranks.comm, self.ranks.size)
        counts = owners.bincount(minlength=self.ranks.size).tolist()
        every = self.ranks.comm.gather_rows(results, counts)  # [pairs, hidden] rank by rank
        order = owners.argsort(stable=True)
        pairs = torch.empty_like(every).index_copy_(0, order, every)
        return self.ops.add_ranks(pairs.view(num_tokens, top_k, pairs.shape[1]), weights)
