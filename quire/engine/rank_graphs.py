"""Whether steps of ranks on GPUs replay CUDA graphs, and why not."""

from __future__ import annotations

from quire.config import Decision
from quire.dist.ranks import Ranks
from quire.models.spec import ModelSpec


def why_by_kernels(
    ranks: Ranks, spec: ModelSpec, enforce_eager: bool, can_capture: bool
) -> str | None:
    """None: their steps replay graphs. `can_capture`: what they say to each other."""
    if not ranks.stage.is_only:
        return "what a stage sends on goes through memory of the host"
    if ranks.has_homes:
        return "how many rows a rank attends is known to the host alone"
    if spec.moe is not None:
        return "how many rows an expert gets is counted on the host"
    if not can_capture:
        return "what ranks say goes through memory of the host"
    return "enforce_eager=True" if enforce_eager else None


def steps_decision(why: str | None) -> Decision:
    """`why`: as `why_by_kernels` has it."""
    if why is not None:
        return Decision("steps", "kernel by kernel", why)
    about = "all ranks capture a step, or none does; with adapters and trees kernel by kernel"
    return Decision("steps", "graphs", about)
