"""A server names the limits it enforces: its own, not the wider ones of the engine."""

from __future__ import annotations

import re
from typing import Any

import pytest

from quire.errors import BadRequest
from quire.server.fields import SamplingFields
from quire.server.sampling import sampling_params
from quire.server.settings import ServeSettings


def params_of(**values: Any) -> Any:
    logprobs = values.pop("logprobs", None)
    fields = SamplingFields(temperature=1.0, **values)
    return sampling_params(fields, ServeSettings(), max_tokens=4, logprobs=logprobs)


def refusal(**values: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        params_of(**values)
    return str(caught.value)


@pytest.mark.parametrize("name", ["n", "logprobs", "prompt_logprobs"])
def test_counts(name: str) -> None:
    """Red when n=0 is told of 256 answers, which the server would refuse as well."""
    found = re.search(r"from (\d+) to (\d+)", refusal(**{name: -1}))
    assert found
    low, high = int(found[1]), int(found[2])
    assert refusal(**{name: low - 1}).endswith(f"from {low} to {high}")
    assert refusal(**{name: high + 1}).endswith(f"from {low} to {high}")
    params_of(**{name: low})
    params_of(**{name: high})


def test_stop_strings() -> None:
    """Red when an empty stop string is told of 64, of which the server takes 16."""
    found = re.search(r"up to (\d+) strings of (\d+) to (\d+) characters", refusal(stop=""))
    assert found
    most, shortest, longest = map(int, found.groups())
    params_of(stop=["x" * shortest] * most)
    params_of(stop="x" * longest)
    for stop in (["x"] * (most + 1), "x" * (longest + 1), ["x" * (shortest - 1)], ["a", ""]):
        assert found[0] in refusal(stop=stop)
