"""Estimate: what a step takes by roofline, for a model's shape on a layout of devices.

Bytes and operations are those of `bench/roofline.py`, in the shares that `dist/cuts.py` gives the
busiest rank. Beside them there is a fixed time for each layer, and what ranks wait for each other:
four gathers a layer, as sums are never split (docs/ranks.md). Experts are whole and evenly visited;
ranks that share layers share the experts. `scaling.py` multiplies what was measured by ratios of
these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.bench.roofline import Feed, attention_load, floats_of, step_loads
from quire.dist.cuts import coarse_cuts, head_cuts, row_cuts, width_cuts
from quire.errors import NotSupported
from quire.models.spec import ModelSpec
from quire.sim.devices import ATTENTION_SHARE, LAYER_S, Device

ITEMSIZE = 2  # bf16
LOGIT_BYTES = 4
LOGIT_PASSES = 3  # written, and read for the maximum and the draw
GATHERS = 4  # a layer
TYPICAL = 4096  # tokens, of the context that slopes are taken at


@dataclass(frozen=True, slots=True)
class Layout:
    """Devices that hold one model: ranks that share each layer, times stages of layers."""

    tp: int = 1
    pp: int = 1

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"tp {self.tp} x pp {self.pp}"

    def check(self, spec: ModelSpec) -> None:
        if self.pp > spec.num_layers:
            raise NotSupported(f"got {self.pp} stages for {spec.num_layers} layers, want no more")
        head_cuts(spec.num_heads, spec.num_kv_heads, self.tp)  # raises NotSupported


@dataclass(frozen=True, slots=True)
class Shares:
    """Of each kind of work, what the busiest rank of a stage does."""

    heads: float
    kv: float
    width: float
    ffn: float
    vocab: float
    experts: float

    @staticmethod
    def of(spec: ModelSpec, tp: int) -> Shares:
        heads = head_cuts(spec.num_heads, spec.num_kv_heads, tp)
        kv = max(cut.kv.size for cut in heads) / spec.num_kv_heads
        experts = 1.0
        if spec.moe is not None:
            experts = -(-spec.moe.router.num_experts // tp) / spec.moe.router.num_experts
        return Shares(
            heads=max(cut.q.size for cut in heads) / spec.num_heads,
            kv=1.0 if spec.mla is not None else kv,  # latents are kept by every rank
            width=max(cut.size for cut in width_cuts(spec.hidden_size, tp)) / spec.hidden_size,
            ffn=max(cut.size for cut in coarse_cuts(spec.ffn_size, tp)) / spec.ffn_size,
            vocab=max(cut.size for cut in row_cuts(spec.vocab_size, tp)) / spec.vocab_size,
            experts=experts,
        )

    def of_kind(self, kind: str) -> float:
        return {
            "qkv": self.heads,
            "out": self.width,
            "up": self.ffn,
            "down": self.width,
            "head": self.vocab,
            "experts": self.experts,
            "cache write": self.kv,
        }[kind]


@dataclass(frozen=True, slots=True)
class Estimate:
    """All times of one model on one layout of one kind of device, stages one after another."""

    spec: ModelSpec
    device: Device
    layout: Layout = Layout()

    @property
    def shares(self) -> Shares:
        return Shares.of(self.spec, self.layout.tp)

    def base_s(self, tokens: int) -> float:
        """A step that feeds so many tokens with nothing behind them and draws one."""
        loads, shares = step_loads(self.spec, [Feed(0, tokens)], ITEMSIZE), self.shares
        bytes_s, flops_s = self.device.ceilings.bandwidth, self.device.ceilings.flops
        total = self.spec.num_layers * LAYER_S
        for kind, load in loads.items():
            if kind != "attention":
                slower = max(load.num_bytes / bytes_s, load.num_flops / flops_s)
                total += slower * shares.of_kind(kind)
        return total

    @property
    def token_bytes(self) -> int:
        """Of the cache, on the device with most of it."""
        whole = floats_of(self.spec, ITEMSIZE).token_bytes * self.shares.kv
        return round(whole / self.layout.pp)

    @property
    def context_s(self) -> float:
        """A token that a decode reads."""
        cache = floats_of(self.spec, ITEMSIZE)
        load = attention_load(self.spec, [Feed(TYPICAL - 1, 1)], cache)
        return load.num_bytes / TYPICAL * self.shares.kv / self.device.ceilings.bandwidth

    @property
    def pair_s(self) -> float:
        """A query and a key of a prompt."""
        cache = floats_of(self.spec, ITEMSIZE)
        load = attention_load(self.spec, [Feed(0, TYPICAL)], cache)
        flops = self.device.ceilings.flops * ATTENTION_SHARE
        return load.num_flops / (TYPICAL * TYPICAL / 2) * self.shares.heads / flops

    @property
    def sample_s(self) -> float:
        """A token that is drawn."""
        spec, ceilings = self.spec, self.device.ceilings
        product = 2.0 * spec.vocab_size * spec.hidden_size * self.shares.vocab / ceilings.flops
        logits = LOGIT_BYTES * LOGIT_PASSES * spec.vocab_size / ceilings.bandwidth
        return product + logits

    def gather_s(self, tokens: int) -> float:
        """What ranks wait for each other in a step."""
        tp, spec = self.layout.tp, self.spec
        if tp == 1:
            return 0.0
        widths = 0
        for layer in range(spec.num_layers):
            widths += 2 * spec.hidden_size + spec.num_heads * spec.head_dim
            if spec.moe is not None and spec.is_sparse(layer):
                widths += spec.moe.router.top_k * spec.hidden_size
            else:
                widths += spec.ffn_size
        arrives = tokens * widths * ITEMSIZE * (tp - 1) / tp
        return GATHERS * spec.num_layers * self.device.link_s + arrives / self.device.link

    @property
    def gather_sample_s(self) -> float:
        """Parts of the logits of a drawn token, come together."""
        tp = self.layout.tp
        return LOGIT_BYTES * self.spec.vocab_size * (tp - 1) / tp / self.device.link

    @property
    def hop_token_s(self) -> float:
        """A token's stream from one stage to the next."""
        if self.layout.pp == 1:
            return 0.0
        return ITEMSIZE * self.spec.hidden_size / self.device.link
