"""What a caller gets back; names and shapes follow vLLM's offline API."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of the n answers to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the stop token or string that ended it, or the error

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Clock readings in seconds, and what follows from them."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    num_preemptions: int = 0
    num_drafted_tokens: int = 0  # guesses that were verified
    num_accepted_tokens: int = 0  # of those, the ones that became output: each saved a step
    accepted_by_position: tuple[int, ...] = ()  # how often a draft so many places ahead was right
    draft_seconds: float = 0.0  # of the host, these answers' share of what making drafts took

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time

    @property
    def queue_time(self) -> float | None:
        if self.first_scheduled_time is None:
            return None
        return self.first_scheduled_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """A prompt with its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    cache_note: str = ""  # why the prefix cache did not serve more


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt with its embedding."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    probs: list[float]  # of each label
    label: str  # the most likely one

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput:
    """A prompt with what a classifier says of it."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ClassificationOutput
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """How well two texts go together; the ids of both when they were read apart."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    data: list[float]


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """A prompt with the plain numbers of the model's head."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finished: bool = True


@dataclass(slots=True)  # not frozen: one is made for each token, in a third of the time
class StreamEvent:
    """What one step added to one answer."""

    text: str
    token_ids: list[int]
    index: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam: the prompt's tokens and those found, with the choices at each step."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None  # of all tokens, the prompt's included
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | None = None  # the token that ended it


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]
