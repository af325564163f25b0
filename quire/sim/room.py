"""Room: which pages a layout of devices has beside a model's weights, by the engine's own sizing.

What the largest step needs is measured in an engine; here it is counted from the model's widths.
"""

from __future__ import annotations

from quire.config import SchedConfig
from quire.dist.stages import stage_layers
from quire.kv.forms import CacheForm
from quire.kv.groups import PageNeeds
from quire.kv.spec import CacheSpec
from quire.memory.sizing import Room, num_pages
from quire.models.kv_cache import cache_of
from quire.models.spec import ModelSpec
from quire.sim.estimate import ITEMSIZE, LOGIT_BYTES, Estimate, Layout, Shares

USABLE = 0.9  # of a device, as `gpu_memory_utilization`


def pages_that_fit(estimate: Estimate, sched: SchedConfig, page_size: int) -> int:
    """Of the stage with the fewest. Raises OutOfMemory where one whole request does not fit."""
    spec, layout, total = estimate.spec, estimate.layout, estimate.device.memory
    shares, cache = estimate.shares, cache_on(spec, layout, page_size)
    needs = PageNeeds(page_size, cache.groups.windows)
    found = []
    for number, layers in enumerate(stage_layers(spec.num_layers, layout.pp)):
        weights = _weights(spec, shares, layers)
        if number == 0:  # the embedding, and where it is another the head
            tables = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
            weights += int(tables * ITEMSIZE * shares.vocab)
        room = Room(total, int(total * USABLE), weights, _step_bytes(spec, shares, sched), None)
        page_bytes = round(cache.of_layers(layers).page_bytes * shares.kv)
        lens = (page_size, sched.max_model_len, sched.max_num_seqs)
        found.append(num_pages(room, page_bytes, *lens, needs))
    return min(found)


def cache_on(spec: ModelSpec, layout: Layout, page_size: int = 16) -> CacheSpec:
    """In floats of the weights' size, whole; its groups are those that the engine would make."""
    form = CacheForm(f"float{8 * ITEMSIZE}", 8 * ITEMSIZE)
    return cache_of(spec, form, page_size=page_size, is_staged=layout.pp > 1)


def _weights(spec: ModelSpec, shares: Shares, layers: range) -> int:
    total = 0.0
    ups = 2 if spec.mlp == "gated" else 1
    tables = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
    for layer in layers:
        if spec.moe is not None and spec.is_sparse(layer):
            moe = spec.moe
            ffn = moe.num_params(spec.hidden_size, moe.router.num_experts) * shares.experts
        else:
            widths = ups * shares.ffn + shares.width
            ffn = spec.hidden_size * spec.ffn_size * widths
        total += ffn
    attention = (spec.num_params - tables - _ffn_params(spec)) / spec.num_layers
    return int((total + len(layers) * attention * shares.heads) * ITEMSIZE)


def _ffn_params(spec: ModelSpec) -> int:
    total, ups = 0, 3 if spec.mlp == "gated" else 2
    for layer in range(spec.num_layers):
        if spec.moe is not None and spec.is_sparse(layer):
            total += spec.moe.num_params(spec.hidden_size, spec.moe.router.num_experts)
        else:
            total += ups * spec.hidden_size * spec.ffn_size
    return total


def _step_bytes(spec: ModelSpec, shares: Shares, sched: SchedConfig) -> int:
    """Of the activations and logits of the largest step."""
    width = 4 * spec.hidden_size + 2 * spec.num_heads * spec.head_dim + 3 * spec.ffn_size
    drawn = LOGIT_BYTES * 2 * spec.vocab_size * sched.max_num_seqs
    return sched.max_num_batched_tokens * width * ITEMSIZE + drawn
