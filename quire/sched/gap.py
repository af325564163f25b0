"""The gap between tokens: how many prompt tokens fit beside decodes into a step of a target time.

A step is as slow for everybody in it as its largest part, and a long prompt beside short answers
makes them stutter. The table of costs says how long a step of so many tokens takes; what is left of
the target goes to prompts. Without decodes nobody waits for the next token, and a prompt gets all.
"""

from __future__ import annotations

from bisect import bisect_right

from quire.sched.costs import StepCosts

LEAST_CHUNK = 16  # tokens of prompts in every step, so that they get on where no time is left


def prompt_budget(budget: int, num_decoding: int, costs: StepCosts, target_s: float) -> int:
    """At most `budget` tokens beside `num_decoding` ones, in whole runs of LEAST_CHUNK.

    >>> costs = StepCosts.of([(1, 0.010), (1001, 0.110)])
    >>> prompt_budget(2048, 1, costs, 0.050), prompt_budget(2048, 1, costs, 0.005)
    (400, 16)
    """
    if num_decoding == 0:
        return budget

    def seconds(num_tokens: int) -> float:
        return costs.seconds(num_decoding + num_tokens)

    fit = bisect_right(range(budget + 1), target_s, key=seconds) - 1
    return min(budget, max(LEAST_CHUNK, fit - fit % LEAST_CHUNK))
