"""Defaults of sampling on their way to the API process."""

from pathlib import Path

import msgspec

from quire.load.recommended import recommended_sampling
from quire.params import SamplingParams
from quire.server.settings import ServeSettings


def test_whole_numbers_stay_whole() -> None:
    """Red when top_k arrives as 20.0, which every request would then be refused for."""
    want = recommended_sampling("qwen2.5-coder-0.5b-instruct", Path("x.gguf"))
    sent = msgspec.json.encode(ServeSettings(default_sampling=want))
    got = msgspec.json.decode(sent, type=ServeSettings).default_sampling
    assert SamplingParams(**got).top_k == 20 and type(got["top_k"]) is int
