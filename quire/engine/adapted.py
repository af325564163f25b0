"""open_adapters: what an engine has of LoRA, for the composition root."""

from __future__ import annotations

from collections.abc import Mapping

from quire.config import Decision, EngineArgs
from quire.lora.adapters import Adapters
from quire.lora.bank import AdapterBank
from quire.memory.sizing import size_text
from quire.models.names import Target
from quire.runner.runner import ModelRunner


def open_adapters(
    args: EngineArgs, runner: ModelRunner, names: Mapping[str, Target], decisions: list[Decision]
) -> Adapters:
    """With those that were asked for at start. Raises CheckpointError or NotSupported."""
    limits = args.max_lora_rank, args.max_loras
    runner.adapters = AdapterBank(runner.model, names, *limits)
    if runner.tapes is not None:
        runner.tapes.adapters = runner.adapters.recorded
    adapters = Adapters(runner.adapters, args.max_loras)
    for name, path in (args.lora or {}).items():
        entry = adapters.load(name, path)
        why = f"rank {entry.facts.rank}, {size_text(entry.facts.num_bytes)} of {entry.path}"
        decisions.append(Decision("adapter", name, why))
    return adapters
