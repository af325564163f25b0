"""open_adapters: what an engine has of LoRA, for the composition root."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quire.config import Decision, EngineArgs
from quire.lora.adapters import Adapters, Facts
from quire.lora.bank import AdapterBank
from quire.memory.sizing import size_text
from quire.models.names import Target
from quire.runner.runner import ModelRunner

if TYPE_CHECKING:
    from quire.engine.rank_group import RankGroup


class GroupBank:
    """`lora.adapters.Bank` of a model that several ranks hold: each has its share of an adapter."""

    def __init__(self, own: AdapterBank, group: RankGroup) -> None:
        self._own, self._group = own, group

    def put(self, number: int, path: str) -> Facts:
        facts = self._own.put(number, path)  # what is wrong with a folder is found here
        self._group.put_adapter(number, path)
        return facts

    def drop(self, number: int) -> None:
        self._own.drop(number)
        self._group.drop_adapter(number)


def open_adapters(
    args: EngineArgs,
    runner: ModelRunner,
    names: Mapping[str, Target],
    decisions: list[Decision],
    group: RankGroup | None = None,
) -> Adapters:
    """With those that were asked for at start. Raises CheckpointError or NotSupported."""
    runner.adapters = AdapterBank(runner.model, names, args.max_loras)
    if runner.tapes is not None:
        runner.tapes.adapters = runner.adapters.recorded
    bank = runner.adapters if group is None else GroupBank(runner.adapters, group)
    adapters = Adapters(bank, args.max_loras)
    for name, path in (args.lora or {}).items():
        entry = adapters.load(name, path)
        why = f"rank {entry.facts.rank}, {size_text(entry.facts.num_bytes)} of {entry.path}"
        decisions.append(Decision("adapter", name, why))
    return adapters
