"""Which captured form a step may take: of few tokens, of one prompt, or of prompts and decodes.

Ranks must take the same one: what they say to each other has its sizes. The first decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.runner.mixed_graphs import MixedSize
from quire.runner.rows import HIDDEN, needs_of
from quire.step import StepForm, StepPlan

if TYPE_CHECKING:
    from quire.runner.runner import ModelRunner


KERNELS = StepForm()


def form_of(runner: ModelRunner, plan: StepPlan) -> StepForm:
    """What this runner does on its own; prompts and mixed steps count as seen."""
    if can_replay(runner, plan):
        assert runner.graphs is not None
        return StepForm("decodes", runner.graphs.batch_bucket(plan.num_tokens))
    if size := prompt_size(runner, plan):
        return StepForm("prompt", size)
    mixed = mixed_size(runner, plan)
    return KERNELS if mixed is None else StepForm("mixed", *mixed)


def form_for_all(runner: ModelRunner, plan: StepPlan) -> StepForm:
    """What all ranks do, as the first decides, and whether they capture it. Graphs of steps with
    adapters or trees are of one rank alone."""
    if not plan.works or runner.rows.uses_adapters(plan) or any(w.parents for w in plan.works):
        return KERNELS
    form = form_of(runner, plan)
    return form._replace(captures=_lacks(runner, plan, form))


def _lacks(runner: ModelRunner, plan: StepPlan, form: StepForm) -> bool:
    """Whether there should be a graph that there is not."""
    longest = max(work.start + work.num_tokens for work in plan.works)
    if form.kind == "decodes":
        assert runner.graphs is not None
        bound = runner.graphs.context_bucket(longest)
        return runner.graphs.lacks((form.num_tokens, bound, plan.shares_prefix, 0))
    if form.kind == "prompt":
        assert runner.graphs is not None and runner.prompt_graphs is not None
        return runner.prompt_graphs.lacks(form.num_tokens, runner.graphs.context_bucket(longest))
    if form.kind == "mixed":
        assert runner.mixed_graphs is not None
        return runner.mixed_graphs.lacks(MixedSize(form.num_tokens, form.num_singles))
    return False


def can_replay(runner: ModelRunner, plan: StepPlan) -> bool:
    """Whether all feed one token and drafts, and nobody needs what a graph does not return."""
    works, rows = plan.works, runner.rows
    if runner.graphs is None or any(w.num_tokens > 1 + w.num_drafts for w in works):
        return False
    if any(needs_of(a.params) & HIDDEN for a in plan.admissions):
        return False
    if rows.reads_hidden(works):
        return False
    if runner.expand_prompts and rows.feeds_prompt(plan):
        return False
    return runner.graphs.covers(plan.num_tokens, max(w.start + w.num_tokens for w in works))


def prompt_size(runner: ModelRunner, plan: StepPlan) -> int:
    """Tokens to pad a lone prompt's last chunk to, for a captured graph; 0: there is none."""
    rows = runner.rows
    if runner.prompt_graphs is None or len(plan.works) != 1 or runner.expand_prompts:
        return 0
    work = plan.works[0]
    new = [needs_of(a.params) for a in plan.admissions if a.row == work.row]
    reads_hidden = bool(new[0] & HIDDEN) if new else rows.reads_hidden(plan.works)
    if not work.sample or work.num_drafts or reads_hidden or rows.uses_adapters(plan):
        return 0
    return runner.prompt_graphs.size_for(work.num_tokens, work.start + work.num_tokens)


def mixed_size(runner: ModelRunner, plan: StepPlan) -> MixedSize | None:
    """What to pad a step of prompts and decodes to; None: there is no graph for it."""
    if runner.mixed_graphs is None or runner.rows.uses_adapters(plan):
        return None
    if any(work.parents for work in plan.works):
        return None  # these graphs read no paths
    lens = [work.num_tokens for work in plan.works]
    longest = max(work.start + work.num_tokens for work in plan.works)
    return runner.mixed_graphs.size_for(lens, longest)
