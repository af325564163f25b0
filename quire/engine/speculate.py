"""speculate: from `speculative_config` to the engine's Speculation, for the composition root."""

from __future__ import annotations

import importlib

from quire.config import Decision
from quire.errors import NotSupported
from quire.runner.runner import ModelRunner
from quire.runner.step_times import measure
from quire.spec.depth import Costs
from quire.spec.proposer import Proposer
from quire.spec.speculation import Limits, Speculation
from quire.speculative import METHODS, SpecConfig, describe


def check_device(device: str) -> None:
    if device != "cpu":
        raise NotSupported(
            f"got speculative_config on {device}: drafts are verified on CPUs only so far, because"
            " captured graphs feed one token a request; leave it out, or use device='cpu'"
        )


def speculation_of(
    config: SpecConfig, runner: ModelRunner, decisions: list[Decision]
) -> Speculation:
    proposers = [_proposer(part, config) for part in config.parts]
    proposer = proposers[0]
    costs: Costs | None = None
    why = f"{describe(config)}, always as deep as asked"
    if config.adaptive:
        times = measure(runner)
        costs = Costs(times.costs, draw=times.draw)
        few = times.costs.seconds(5) / times.costs.seconds(1)
        why = f"depth by survival and cost: a step of 5 tokens takes {few:.2f} times one of 1"
    decisions.append(Decision("speculation", f"{config.method}, up to {config.depth}", why))
    return Speculation(proposer, Limits(config.depth, not config.adaptive), costs)


def _proposer(part: str, config: SpecConfig) -> Proposer:
    module, _, name = METHODS[part].proposer.partition(":")
    made: Proposer = getattr(importlib.import_module(module), name)(config)
    return made
