"""speculate: from `speculative_config` to the engine's Speculation, for the composition root.

A model that drafts is loaded before pages are counted: each page has room for its keys and values
as well, so both models live in one budget and one page table.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace

from quire.config import Decision, EngineArgs, EngineConfig
from quire.engine.cpu_path import CpuPath
from quire.engine.draft_exit import ExitPart, open_exit
from quire.engine.draft_heads import (
    FeaturePart,
    HeadPart,
    MedusaPart,
    open_head,
)
from quire.engine.draft_model import DraftModel, open_draft_model, open_whole_exit
from quire.engine.whole_ends import TargetModel
from quire.errors import NotSupported
from quire.runner.drafter import ModelDrafter, drafting_rows
from quire.runner.feature_drafter import FeatureDrafter
from quire.runner.medusa_drafter import MedusaDrafter
from quire.runner.runner import ModelRunner
from quire.runner.step_times import measure, rehearsed
from quire.sched.costs import StepCosts
from quire.spec.depth import Costs
from quire.spec.forced import Forced
from quire.spec.in_turn import InTurn
from quire.spec.neural import CHANCE
from quire.spec.proposer import Proposer
from quire.spec.speculation import Limits, Speculation
from quire.speculative import METHODS, SpecConfig, describe, parse_speculative

HEADS = ("eagle3", "medusa", "mtp")  # methods whose drafts a head makes of hidden states
AnyDrafter = ModelDrafter | FeatureDrafter | MedusaDrafter


@dataclass(frozen=True, slots=True)
class SpecParts:
    """What speculation adds to an engine: nothing where it was not asked for."""

    config: SpecConfig | None
    cpu: CpuPath
    draft: DraftModel | HeadPart | ExitPart | None = None

    @staticmethod
    def open(
        args: EngineArgs, target: TargetModel, engine: EngineConfig, cpu: CpuPath
    ) -> SpecParts:
        """Loads the model or the head that drafts, where the method has one."""
        if args.speculative_config is None:
            return SpecParts(None, cpu)
        config = parse_speculative(args.speculative_config)
        if config.model_part in HEADS:
            return SpecParts(config, cpu, open_head(config, args, target, cpu))
        if config.model_part == "early_exit":
            part = open_exit(config, args, target, cpu)
            if target.model.ranks.num_processes == 1:
                return SpecParts(config, cpu, part)
            return SpecParts(config, cpu, open_whole_exit(part, args, target, engine, cpu))
        if config.model is None:
            return SpecParts(config, cpu)
        return SpecParts(config, cpu, open_draft_model(config, args, target, engine, cpu))

    @property
    def page_bytes(self) -> int:
        """What each page must hold besides the target's keys and values."""
        return 0 if self.draft is None else self.draft.page_bytes

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose input is read."""
        return () if self.draft is None else self.draft.taps

    def finish(
        self, runner: ModelRunner, engine: EngineConfig, decisions: list[Decision]
    ) -> Speculation | None:
        """For a runner that has its pages."""
        if self.config is None:
            return None
        drafter = None
        if self.config.model_part is not None:
            drafter = runner.drafter = self._drafter(runner, self.config, engine, decisions)
        most = None if self.draft is None else self.draft.most
        config, max_tokens = _up_to(self.config, most), engine.sched.max_num_batched_tokens
        return speculation_of(config, runner, drafter, max_tokens, decisions)

    def _drafter(
        self,
        target: ModelRunner,
        config: SpecConfig,
        engine: EngineConfig,
        decisions: list[Decision],
    ) -> AnyDrafter:
        """A model or a head that drafts for this runner."""
        draft, max_tokens = self.draft, engine.sched.max_num_batched_tokens
        if isinstance(draft, (MedusaPart, FeaturePart)):
            target.hand_over(draft.reads)
            return draft.attach(target, max_tokens)
        if isinstance(draft, DraftModel):
            model, heads, backend = draft.model, draft.heads, draft.backend
            pool, num_groups = draft.pool(target.pool), 1
        else:
            assert draft is not None, "a method without what drafts"
            model, heads, backend = draft.cut(target.model), target.spec, target.backend
            pool, num_groups = target.pool, len(target.pool.groups)
        rows = drafting_rows(target.rows, num_groups)
        expands = target.expand_prompts and isinstance(draft, ExitPart)
        use_graphs = target.graphs is not None and backend.caps.graphs
        runner = ModelRunner(model, backend, heads, pool, rows, use_graphs, expands)
        notes: list[Decision] = []
        runner.tapes = self.cpu.record(model, backend, pool, engine, notes)
        decisions += [Decision(f"draft {note.what}", note.value, note.why) for note in notes]
        return ModelDrafter(target, runner, max_tokens)


def _up_to(config: SpecConfig, most: int | None) -> SpecConfig:
    """With a depth that the heads there are can fill."""
    if most is None or config.levels <= most:
        return config
    if config.tree is not None:
        return replace(config, tree=None, speculative_token_tree=config.token_tree(most))
    if config.speculative_token_tree is not None:
        raise NotSupported(
            f"got a speculative_config.speculative_token_tree {config.levels} tokens deep, but"
            f" there are {most} heads; use one of {most} or less"
        )
    if config.num_speculative_tokens is not None:
        raise NotSupported(
            f"got speculative_config.num_speculative_tokens={config.num_speculative_tokens}, but"
            f" there are {most} heads; use {most} or less"
        )
    return replace(config, num_speculative_tokens=most)


def speculation_of(
    config: SpecConfig,
    runner: ModelRunner,
    drafter: AnyDrafter | None,
    max_tokens: int,
    decisions: list[Decision],
) -> Speculation:
    texts = [_proposer(part, config) for part in config.parts if part != config.model_part]
    model = None if config.model_part is None else _proposer(config.model_part, config)
    if model is not None and not texts:
        texts, model = [model], None
    proposer = InTurn([Forced(runner.masks.forced), *texts])
    costs: Costs | None = None
    why = f"{describe(config)}, always as deep as asked"
    if config.adaptive:
        times = measure(runner, max_tokens)
        draft = None if drafter is None else _costs_of(drafter)
        costs = Costs(times.costs, draft, times.draw, times.wait)
        few = times.costs.seconds(5) / times.costs.seconds(1)
        why = f"depth by survival and cost: a step of 5 tokens takes {few:.2f} times one of 1"
        if draft is not None:
            why += f", one of the drafter {draft.seconds(1) / times.costs.seconds(1):.2f}"
    what = f"{config.method}, up to {config.depth}"
    if config.token_tree(config.levels) is not None:
        _check_trees(runner)
        what += f" in a tree of {config.levels} levels"
    decisions.append(Decision("speculation", what, why))
    counts = None if drafter is None else drafter.counts
    has_head = isinstance(drafter, (FeatureDrafter, MedusaDrafter))
    limits = Limits(config.depth, not config.adaptive, config.method, CHANCE if has_head else 0.0)
    return Speculation(proposer, limits, costs, counts, model)


def _check_trees(runner: ModelRunner) -> None:
    backend = runner.backend
    if backend.caps.by_node and runner.homes is not None:
        raise NotSupported(
            f"got a tree of drafts with attention {type(backend).__name__} on ranks that have"
            " requests of their own: leave speculative_config's tree out, and drafts are a chain,"
            " or use data_parallel_size=1"
        )
    if not backend.caps.trees:
        raise NotSupported(
            f"got a tree of drafts with attention {type(backend).__name__}, which reads no paths:"
            " leave speculative_config's tree out, and drafts are a chain, or use another"
            " attention_backend"
        )


def _costs_of(drafter: AnyDrafter) -> StepCosts:
    if isinstance(drafter, ModelDrafter):
        times = measure(drafter.runner, drafter.max_tokens)
        return times.costs.less(times.wait)  # nobody waits between two guesses
    return rehearsed(drafter)


def _proposer(part: str, config: SpecConfig) -> Proposer:
    module, _, name = METHODS[part].proposer.partition(":")
    made: Proposer = getattr(importlib.import_module(module), name)(config)
    return made
