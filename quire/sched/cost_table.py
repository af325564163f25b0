"""CostTable: what a step takes on one device for one model, by what is in it. Measured and fitted.

    seconds = base(tokens fed) + context * tokens that decodes read + pair * pairs that prompts
              attend + sample * tokens drawn
    host    = a step, and each request in it, outside the device

Steps that feed a part of a prompt may have a base of their own: a GPU takes another way for them
than for decodes alone.

`quire bench costs` writes one (`bench/step_costs.py`); the simulator's runner knows nothing else of
a device. Tables that were not measured are made in `sim/` and labelled so. A plain value that JSON
holds. No torch.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from quire.errors import BadRequest
from quire.sched.costs import StepCosts
from quire.step import StepPlan

# How a table came about. Whatever is made of it says so.
MEASURED = "measured"  # by `quire bench costs`, on this device
PUBLISHED = "published"  # fitted to figures that were measured and stand in the docs
SCALED = "scaled"  # by roofline, from one of the above
ESTIMATED = "estimated"  # by roofline alone


class EngineFacts(msgspec.Struct, frozen=True):
    """What the measured engine decided, which a simulation starts from."""

    model: str
    device: str
    ranks: int
    overlaps: bool  # steps are planned while the one before runs
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int
    windows: tuple[int | None, ...]  # of the layer groups
    stages: int = 1  # of layers, one behind the other on devices of their own
    token_bytes: int = 0  # of the cache, on one device; 0: not known


class Load(msgspec.Struct, frozen=True):
    """What is in a step, as far as its time depends on it."""

    tokens: int = 0
    context: int = 0  # tokens that requests which feed one token have behind them, all together
    pairs: float = 0.0  # of a query and a key, in requests that feed several
    samples: int = 0
    works: int = 0

    @staticmethod
    def of(plan: StepPlan) -> Load:
        context, pairs = 0, 0.0
        for work in plan.works:
            if work.num_tokens == 1:
                context += work.start
            else:
                pairs += work.num_tokens * (work.start + work.num_tokens / 2)
        samples = sum(1 + work.num_drafts for work in plan.works if work.sample)
        return Load(plan.num_tokens, context, pairs, samples, len(plan.works))


class Point(msgspec.Struct, frozen=True):
    """A step that was measured, and what the table says of it."""

    load: Load
    seconds: float
    fitted: float


class CostTable(msgspec.Struct, frozen=True):
    engine: EngineFacts
    tokens: tuple[int, ...]  # ascending
    times: tuple[float, ...]  # seconds of steps that feed so many
    context_s: float
    pair_s: float
    sample_s: float
    host_s: float = 0.0
    host_work_s: float = 0.0
    points: tuple[Point, ...] = ()
    hop_s: float = 0.0  # from one stage to the next: a step ...
    hop_token_s: float = 0.0  # ... and each token it feeds
    label: str = MEASURED
    source: str = ""  # what it was made from, where it was not measured here
    prompt_tokens: tuple[int, ...] = ()  # the same for steps with a part of a prompt
    prompt_times: tuple[float, ...] = ()

    @property
    def decodes(self) -> StepCosts:
        return StepCosts(self.tokens, self.times)

    @property
    def prompts(self) -> StepCosts:
        """Of steps with a part of a prompt."""
        if not self.prompt_tokens:
            return self.decodes
        return StepCosts(self.prompt_tokens, self.prompt_times)

    def seconds(self, load: Load) -> float:
        """On the device."""
        base = (self.prompts if load.pairs else self.decodes).seconds(load.tokens)
        more = self.context_s * load.context + self.pair_s * load.pairs
        return base + more + self.sample_s * load.samples

    def hop_seconds(self, load: Load) -> float:
        """Between two stages."""
        return self.hop_s + self.hop_token_s * load.tokens

    def host_seconds(self, load: Load) -> float:
        """Planning a step and settling it."""
        return self.host_s + self.host_work_s * load.works

    @property
    def fit_error(self) -> float:
        """Mean relative error over the points that were measured."""
        errors = [abs(point.fitted / point.seconds - 1.0) for point in self.points]
        return sum(errors) / max(1, len(errors))

    def write(self, path: Path) -> None:
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        except OSError as error:
            raise BadRequest(f"cannot write {path}: {error.strerror}") from error

    @staticmethod
    def read(path: Path) -> CostTable:
        try:
            table = msgspec.json.decode(path.read_bytes(), type=CostTable)
        except OSError as error:
            raise BadRequest(f"cannot read the costs {path}: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise BadRequest(
                f"{path} holds no costs: {error}; 'quire bench costs --out FILE' writes them"
            ) from error
        bases = ((table.tokens, table.times), (table.prompt_tokens, table.prompt_times))
        for tokens, times in bases:
            if len(tokens) != len(times) or not table.tokens:
                raise BadRequest(f"{path} holds {len(times)} times for {len(tokens)} sizes")
        return table
