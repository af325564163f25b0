"""Quire: an LLM inference engine that reads like one gathering of pages.

Importing the package imports neither torch nor triton; building an `LLM` does.
"""

from quire.errors import QuireError
from quire.llm import LLM
from quire.outputs import CompletionOutput, RequestOutput, StreamEvent
from quire.params import SamplingParams
from quire.version import __version__

__all__ = [
    "LLM",
    "CompletionOutput",
    "QuireError",
    "RequestOutput",
    "SamplingParams",
    "StreamEvent",
    "__version__",
]
