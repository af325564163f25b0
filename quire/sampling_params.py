"""The same names as `quire.params`, where scripts written for vLLM look for them."""

from quire.params import BeamSearchParams, SamplingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "SamplingParams", "StructuredOutputsParams"]
