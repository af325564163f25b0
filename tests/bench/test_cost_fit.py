"""The table of step costs fitted to steps whose times follow a known rule."""

from __future__ import annotations

import pytest

from quire.bench.step_costs import fit
from quire.sched.cost_table import EngineFacts, Load

FACTS = EngineFacts("m", "cuda", 1, True, 256, 8192, 9216, 16, 4096, (None,))
DECODES = [Load(n, n * context, 0.0, n, n) for n in (1, 8, 64, 256) for context in (16, 1024)]
PROMPTS = [Load(n, 0, n * (start + n / 2), 1, 1) for n in (8, 64, 256, 1024) for start in (0, 512)]


def seconds(load: Load) -> float:
    """Whatever has a prompt in it takes another way, which costs 8 ms before it begins."""
    floor = 0.009 if load.pairs else 0.001
    return floor + 2e-6 * load.tokens + 1e-8 * load.context + 5e-10 * load.pairs


def test_steps_with_prompts_have_a_base_of_their_own() -> None:
    """Red when decodes are charged for how prompts are launched, or the other way round."""
    loads = [*DECODES, *PROMPTS]
    table = fit(FACTS, loads, [seconds(load) for load in loads], by_form=True)
    assert table.fit_error < 1e-6
    for load in (Load(32, 32 * 400, 0.0, 32, 32), Load(128, 0, 128 * 64.0, 1, 1)):
        assert table.seconds(load) == pytest.approx(seconds(load), rel=1e-6)
    both = fit(FACTS, loads, [seconds(load) for load in loads])
    assert both.prompt_tokens == () and both.fit_error > 0.1


@pytest.mark.parametrize("loads", [DECODES, PROMPTS], ids=["decodes", "prompts"])
def test_one_kind_of_steps_has_one_base(loads: list[Load]) -> None:
    table = fit(FACTS, loads, [seconds(load) for load in loads], by_form=True)
    assert table.prompt_tokens == () and table.fit_error < 1e-6
