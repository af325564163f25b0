"""open_adapters: what an engine has of LoRA, for the composition root."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quire.config import Decision, EngineArgs, SchedConfig
from quire.errors import NotSupported
from quire.lora.adapters import Adapters, Bank
from quire.lora.bank import AdapterBank
from quire.lora.folder import WEIGHTS
from quire.lora.host_room import HostRoom
from quire.lora.placed import check_model
from quire.memory.sizing import size_text
from quire.models.names import Target
from quire.runner.captured import decoded
from quire.runner.device import free_memory
from quire.runner.graphs import SHORTEST_CONTEXT
from quire.runner.runner import ModelRunner
from quire.runner.warmup import SOME
from quire.sched.policies import waiting_line

if TYPE_CHECKING:
    from quire.engine.rank_group import RankGroup
    from quire.runner.adapted_graphs import AdaptedGraphs


MAX_LORAS_USUALLY = 32
COPIES_SHARE = 8  # copies of adapters on the host take so little of what is free at start
USUAL_RANK = 16  # up to it, padded; of larger ones some kernels compile with the first


def open_adapters(
    args: EngineArgs,
    sched: SchedConfig,
    runner: ModelRunner,
    names: Mapping[str, Target],
    decisions: list[Decision],
    group: RankGroup | None = None,
) -> Adapters:
    """With those that were asked for at start. Raises CheckpointError or NotSupported."""
    most = args.max_loras or MAX_LORAS_USUALLY
    own = runner.adapters = AdapterBank(runner.model, names, most)
    if runner.tapes is not None:
        runner.tapes.adapters = own.recorded
    if own.on_gpu is not None and runner.graphs is not None:
        from quire.runner.adapted_graphs import AdaptedGraphs  # CPU installs need no triton

        graphs = AdaptedGraphs(partial(decoded, runner), own, runner.rows, runner.graphs)
        runner.adapted_graphs = graphs
        own.on_first = partial(_compile, runner, graphs)
        if args.max_loras is not None and not args.lora:
            _compile_ahead(own, runner, graphs)
    adapters = Adapters(_bank(own, group), most, waiting_line(sched), _host_room(args))
    for name, path in (args.lora or {}).items():
        entry = adapters.load(name, path)
        why = f"rank {entry.facts.rank}, {size_text(entry.facts.num_bytes)} of {entry.path}"
        decisions.append(Decision("adapter", name, why))
    return adapters


def _bank(own: AdapterBank, group: RankGroup | None) -> Bank:
    if group is None:
        return own
    from quire.engine.group_bank import GroupBank  # one rank needs no messages

    return GroupBank(own, group)


def _host_room(args: EngineArgs) -> HostRoom:
    """For copies of adapters that made room: each rank keeps as much as the first."""
    free = free_memory(torch.device("cpu")) // args.parallel.num_ranks
    return HostRoom(free // COPIES_SHARE, args.max_cpu_loras)


def adapter_bytes(args: EngineArgs) -> int:
    """What those that were asked for at start take of a GPU, to be set aside before the cache is
    sized. Whoever cannot be read is named later, when it is."""
    files = (Path(path).expanduser() / WEIGHTS for path in (args.lora or {}).values())
    return sum(file.stat().st_size for file in files if file.is_file())


def _compile_ahead(bank: AdapterBank, runner: ModelRunner, graphs: AdaptedGraphs) -> None:
    """Somebody will load adapters: kernels compile now, as if there were one of a usual rank."""
    try:
        check_model(runner.model)
    except NotSupported:
        return  # said when somebody loads one
    assert bank.on_gpu is not None
    with bank.on_gpu.as_if_of(USUAL_RANK):
        _compile(runner, graphs)


def _compile(runner: ModelRunner, graphs: AdaptedGraphs) -> None:
    """The kernels of decodes with adapters, side by side, for a few rows and for some more."""
    from quire.kernels.rehearsal import rehearsal

    rows, device = runner.rows, runner.model.device
    bound = min(SHORTEST_CONTEXT, rows.max_len)
    with torch.inference_mode(), torch.cuda.device(device), rehearsal():
        for size in sorted({1, min(SOME, rows.max_rows)}):
            spare = torch.full((size,), rows.max_rows, dtype=torch.int32, device=device)
            graphs.step(spare, torch.zeros_like(spare), bound, shares_prefix=False)
