"""Limits: the least time, or the most tokens a second, that a device allows for a row of the suite.

Decode and prefill rows have one kind of step, so their bytes and operations also give the rates
achieved. A throughput row has a looser bound: there are at least as many steps as the longest
answer has tokens, each reads all weights, and every answer reads its own past at every token.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.bench.roofline import (
    Ceilings,
    Feed,
    Load,
    attention_load,
    floats_of,
    step_loads,
    total,
)
from quire.bench.suite import OWN_TOKENS, Row, request_lengths
from quire.models.spec import ModelSpec

ITEMSIZE = 2  # the suite runs in bf16
# Of a weight, its scales or places among them.
BITS = {"rtn-int4-g128": 4.125, "fp8": 8.0, "int8": 8.0, "sparse24": 9.0}
WHOLE_HEAD = ("sparse24",)  # others have eight bits there
BY_BYTES = (
    "fp8",
    "int8",
)  # inputs are rounded too: the matrix unit does two of 8 bits for one of 16


def step_load(row: Row, spec: ModelSpec) -> Load | None:
    """One step of the row, in the middle of its answers; None where steps differ."""
    if row.kind == "decode":
        feeds = [Feed(row.prompt + row.output // 2, 1)] * row.requests
    elif row.kind == "prefill":
        feeds = [Feed(0, row.prompt)]
    else:
        return None
    return _in_bits(total(step_loads(spec, feeds, ITEMSIZE).values()), row, spec)


def _in_bits(step: Load, row: Row, spec: ModelSpec) -> Load:
    """With weights in the row's form, the head in its own."""
    if not row.form:
        return step
    weights = total(step_loads(spec, [], ITEMSIZE).values()).num_bytes
    head = ITEMSIZE * spec.vocab_size * spec.hidden_size
    head_bits = 16 if row.form in WHOLE_HEAD else 8
    packed = (weights - head) * BITS[row.form] / 16 + head * head_bits / 16
    num_flops = step.num_flops
    if row.form in BY_BYTES:
        num_fed = row.prompt if row.kind == "prefill" else row.requests
        num_flops -= num_fed * (spec.num_active_params - _tables(spec))  # half of two each
    return Load(step.num_bytes - weights + packed, num_flops)


def limit_of(row: Row, spec: ModelSpec, ceilings: Ceilings) -> float | None:
    """The limit in the row's unit; None where the device is not the limit."""
    step = step_load(row, spec)
    if step is not None:
        return step.seconds(ceilings) * 1e3
    if row.kind == "start":
        return None
    work = Workload.of(row)
    return work.num_output / work.load(spec).seconds(ceilings)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are all there from the start."""

    lengths: list[tuple[int, int]]  # (own prompt, output)
    num_shared: int = 0  # tokens of a prefix that is already in the cache

    @staticmethod
    def of(row: Row) -> Workload:
        if row.kind == "prefix":
            return Workload([(OWN_TOKENS, row.output)] * row.requests, row.prompt)
        return Workload(request_lengths(row, 0))

    @property
    def num_output(self) -> int:
        return sum(num_output for _, num_output in self.lengths)

    def load(self, spec: ModelSpec) -> Load:
        num_steps = max(num_output for _, num_output in self.lengths)
        weights = total(step_loads(spec, [], ITEMSIZE).values()).num_bytes
        cache = floats_of(spec, ITEMSIZE)
        num_bytes = num_steps * (weights + self.num_shared * cache.token_bytes)
        num_flops = 0.0
        for num_prompt, num_output in self.lengths:
            # All but the last token drawn are fed again.
            feed = Feed(self.num_shared, num_prompt + num_output - 1)
            num_flops += attention_load(spec, [feed], cache).num_flops
            past = sum(range(num_prompt + 1, num_prompt + num_output))
            num_bytes += past * cache.token_bytes
        layers = 2 * (spec.num_active_params - _tables(spec))
        num_fed = sum(num_prompt + num_output - 1 for num_prompt, num_output in self.lengths)
        num_flops += layers * num_fed + 2 * spec.vocab_size * spec.hidden_size * self.num_output
        return Load(num_bytes, num_flops)


def _tables(spec: ModelSpec) -> int:
    """Parameters of the embedding and, where it has its own, of the head."""
    return spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
