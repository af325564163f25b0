"""Scaling: tables for devices and layouts that nobody measured, made by roofline and labelled so.

    scaled     a table that was measured, each of its numbers times what the roofline gives for the
               new device, layout or model, divided by what it gives for the old: so products keep
               the share of the roof that they were seen to reach
    estimated  the roofline's own numbers, where there is no table of the model

What ranks and stages wait for each other is added from stated speeds of links in both.
"""

from __future__ import annotations

from itertools import accumulate

import msgspec

from quire.errors import BadRequest
from quire.models.spec import ModelSpec
from quire.sched.cost_table import ESTIMATED, SCALED, CostTable, EngineFacts
from quire.sim.devices import Device
from quire.sim.estimate import Estimate, Layout
from quire.sim.room import cache_on

KNOTS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def scaled(table: CostTable, was: Estimate, now: Estimate, model: str) -> CostTable:
    """`was` is what the table was measured on, one device; `model` names what `now` is of."""
    if table.engine.ranks != 1 or table.engine.stages != 1:
        raise BadRequest(
            f"the table is of {table.engine.ranks} ranks and {table.engine.stages} stages already;"
            " scale one of a single device"
        )
    if now == was:
        return table
    now.layout.check(now.spec)

    def moved(tokens: tuple[int, ...], times: tuple[float, ...]) -> tuple[float, ...]:
        found = (
            seconds * now.base_s(num) / was.base_s(num) + now.gather_s(num)
            for num, seconds in zip(tokens, times, strict=True)
        )
        return tuple(accumulate(found, max))

    whence = f"{table.label} of {table.engine.model} on {table.engine.device}"
    whence += f" ({table.source})" if table.source else ""
    return msgspec.structs.replace(
        table,
        engine=_facts(table.engine, now, model),
        times=moved(table.tokens, table.times),
        prompt_times=moved(table.prompt_tokens, table.prompt_times),
        context_s=table.context_s * now.context_s / was.context_s,
        pair_s=table.pair_s * now.pair_s / was.pair_s,
        sample_s=table.sample_s * now.sample_s / was.sample_s + now.gather_sample_s,
        points=(),
        hop_s=_hop_s(now),
        hop_token_s=now.hop_token_s,
        label=SCALED,
        source=f"{whence}, to {model} on {now.layout} of {now.device.name}: {now.device.source}",
    )


def _facts(old: EngineFacts, now: Estimate, model: str) -> EngineFacts:
    is_another = model != old.model
    remade = is_another or now.layout.pp > 1
    return msgspec.structs.replace(
        old,
        model=model,
        device=now.device.name,
        ranks=now.layout.tp,
        stages=now.layout.pp,
        token_bytes=now.token_bytes,
        max_model_len=now.spec.max_positions if is_another else old.max_model_len,
        windows=cache_on(now.spec, now.layout).groups.windows if remade else old.windows,
    )


def estimated(spec: ModelSpec, model: str, device: Device, layout: Layout) -> CostTable:
    """With the engine's usual limits for a device of that size."""
    layout.check(spec)
    now = Estimate(spec, device, layout)
    facts = EngineFacts(
        model=model,
        device=device.name,
        ranks=layout.tp,
        overlaps=True,
        max_num_seqs=512 if device.memory >= 64 << 30 else 256,
        max_num_batched_tokens=8192,
        max_model_len=spec.max_positions,
        page_size=16,
        num_pages=0,
        windows=cache_on(spec, layout).groups.windows,
        stages=layout.pp,
        token_bytes=now.token_bytes,
    )
    return CostTable(
        facts,
        KNOTS,
        tuple(accumulate((now.base_s(n) + now.gather_s(n) for n in KNOTS), max)),
        now.context_s,
        now.pair_s,
        now.sample_s + now.gather_sample_s,
        hop_s=_hop_s(now),
        hop_token_s=now.hop_token_s,
        label=ESTIMATED,
        source=f"roofline of {layout} of {device.name}: {device.source}",
    )


def _hop_s(now: Estimate) -> float:
    return now.device.link_s if now.layout.pp > 1 else 0.0
