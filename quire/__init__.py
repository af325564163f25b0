"""Quire: an LLM inference engine that reads like one gathering of pages.

Importing the package imports neither torch nor triton; building an `LLM` does.
"""

import quire.env as _env
from quire.errors import QuireError
from quire.inputs import TextPrompt, TokensPrompt
from quire.llm import LLM
from quire.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    StreamEvent,
)
from quire.params import SamplingParams, StructuredOutputsParams
from quire.version import __version__

__all__ = [
    "LLM",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "QuireError",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StreamEvent",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_env.ask_for_one_blas()  # before anything imports torch
