"""Prefill and decode in two engines: tokens and floats are those of one engine that does both.

Turns red when a page is taken from an engine that is not of the same model, when an abort or the
death of the other side changes a token, or leaves anything in either engine.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire.disagg.sockets import SocketConnector
from quire.engine.build import Engine
from quire.engine.lending import ticket_for
from quire.errors import NotSupported
from quire.request import Request
from quire.step import TokenLogprobs
from tests.tiers.test_engine import alone, engine_of, records, requests


def compute(prefill: Engine, request: Request) -> str:
    """What the engine process does with a request that asks for a ticket."""
    made = Request.new(request.id, request.tokens, request.params, cache_salt=request.cache_salt)
    made.kv_lease, made.max_tokens = True, 1
    prefill.core.add(made)
    events = []
    while prefill.core.has_work:
        events += prefill.core.step()
    return ticket_for(made, events[-1], prefill)


class Apart:
    """An engine that prefills and one that decodes, with a secret in common."""

    def __init__(self, folder: Path, case: str = "floats", **changes: Any) -> None:
        secret = {"kv_secret": str(folder / "secret")}
        self.prefill = engine_of(case, kv_role="prefill", kv_listen="127.0.0.1:0", **secret)
        assert self.prefill.tiers is not None
        remote = self.prefill.tiers.remote
        assert isinstance(remote, SocketConnector)
        self.remote = remote
        peers = {"kv_peers": (remote.address,), **secret}
        self.decode = engine_of(case, kv_role="decode", **peers, **changes)

    def compute(self, request: Request) -> str:
        return compute(self.prefill, request)

    def run(self, asked: list[Request]) -> dict[int, list[TokenLogprobs]]:
        for request in asked:
            request.kv_source = self.compute(request)
        return records(self.decode, asked)

    def close(self) -> None:
        """Nothing may be left: no lease, no pin, no page."""
        assert len(self.remote.leases) == 0
        for engine in (self.prefill, self.decode):
            tiers = engine.tiers
            assert tiers is not None and tiers.memory._pinned == {}
            assert engine.core.scheduler.kv.allocator.num_live == 0
            tiers.close()


@pytest.mark.parametrize("case", ["floats", "full and windowed", "int4", "latents in fp8"])
def test_apart_is_as_together(case: str, tmp_path: Path) -> None:
    apart = Apart(tmp_path, case)
    assert apart.run(requests()) == alone(case)
    assert apart.decode.tiers is not None
    counts = apart.decode.tiers.counts
    assert counts.loads_remote > 20 and counts.failed_pulls == 0
    assert apart.run(requests("another salt")) == alone(case)
    apart.close()


def test_the_other_side_dies(tmp_path: Path) -> None:
    """Tickets of a lender that is gone, one that forgot, one that sends half: all are computed."""
    apart = Apart(tmp_path)
    asked = requests()
    for request in asked:
        request.kv_source = apart.compute(request)
    apart.remote.leases.end_all()
    assert records(apart.decode, asked) == alone("floats")
    assert apart.decode.tiers is not None
    assert apart.decode.tiers.counts.failed_pulls == len([r for r in asked if r.kv_source])
    again = requests("other")
    for request in again:
        request.kv_source = apart.compute(request)
    apart.remote.close()
    assert records(apart.decode, again) == alone("floats")
    assert apart.decode.tiers.counts.loads_remote == 0
    apart.close()


def test_aborts_at_any_moment_leave_nothing(tmp_path: Path) -> None:
    apart, rng = Apart(tmp_path), random.Random(2)
    for round in range(12):
        asked = requests(f"round {round}")
        for request in asked:
            request.kv_source = apart.compute(request)
            apart.decode.core.add(request)
        for _ in range(rng.randrange(4)):
            apart.decode.core.step()
        gone = rng.sample(asked, 3)
        for request in gone:
            apart.decode.core.abort(request.id)
        while apart.decode.core.has_work:
            apart.decode.core.step()
        for request in asked:
            said = [one.token for one in alone("floats")[request.id]]
            want = said[: request.num_output] if request in gone else said
            assert request.output == want
        apart.remote.leases.end_all()  # as their deadline does
    apart.decode.tiers._puller.wait(5.0)
    apart.close()


def test_engines_of_other_models_share_nothing(tmp_path: Path) -> None:
    """Red when pages of another form or another secret get beyond the greeting."""
    apart = Apart(tmp_path, kv_cache_dtype="int8")
    asked = requests()
    want = records(engine_of("floats", kv_cache_dtype="int8"), requests())
    assert apart.run(asked) == want
    assert apart.decode.tiers is not None and apart.decode.tiers.counts.loads_remote == 0
    assert apart.decode.tiers.counts.failed_pulls > 0
    apart.remote.leases.end_all()
    apart.close()


def test_a_lender_gives_what_only_its_pool_has(tmp_path: Path) -> None:
    """A prefix that memory has dropped and the pool still has is copied out again."""
    apart = Apart(tmp_path)
    first = requests()[3]
    apart.compute(first)
    apart.remote.leases.end_all()
    memory = apart.prefill.tiers.memory
    memory.limit = 0
    memory.let_go("nobody")
    memory._trim()
    assert len(memory) == 0
    memory.limit = 1 << 30
    assert apart.run([requests()[3]]) == {3: alone("floats")[3]}
    assert apart.decode.tiers.counts.loads_remote == 12
    apart.close()


def test_roles_are_checked(tmp_path: Path) -> None:
    for args, word in (
        ({"kv_role": "decode"}, "which engines prefill"),
        ({"kv_role": "middle"}, "'both', 'prefill' or 'decode'"),
        ({"kv_listen": "127.0.0.1:0"}, "want 'prefill'"),
        ({"kv_peers": ("127.0.0.1:1",)}, "want 'decode'"),
        ({"kv_role": "prefill", "kv_listen": "nowhere"}, "127.0.0.1:7000"),
        ({"kv_role": "prefill", "kv_secret": "/proc/none"}, "name another file"),
    ):
        with pytest.raises(NotSupported, match=word):
            engine_of("floats", **args)
