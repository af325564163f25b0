"""Prompts that come back as numbers, in the shapes of vLLM's outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.errors import BadRequest, EngineDead
from quire.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)

if TYPE_CHECKING:
    from quire.engine.output import Conversation
    from quire.models.sequence_head import Verdict


def check_pooling_params(params: object) -> None:
    if params is not None:
        raise BadRequest(
            f"got pooling_params={params!r}, want None: numbers come as the model makes them;"
            " embed and score take pooling='mean' or 'last'",
            param="pooling_params",
        )


def check_pooling_task(task: str | None, has_head: bool) -> str:
    """What `encode` does where nothing was said: what the model was made for."""
    if task is None:
        return "classify" if has_head else "embed"
    if task not in ("embed", "classify"):
        raise BadRequest(
            f"got pooling_task={task!r}, want 'embed' or 'classify': there is one vector for each"
            " prompt, none for each token",
            param="pooling_task",
        )
    return task


def pooled(conversation: Conversation) -> PoolingRequestOutput:
    result = conversation.result()
    if not conversation.embedding:
        raise EngineDead(
            f"prompt {result.request_id} of {len(result.prompt_token_ids)} tokens ended without"
            f" its numbers: {result.outputs[0].stop_reason}; ask for the others without it"
        )
    return PoolingRequestOutput(
        result.request_id, result.prompt_token_ids, PoolingOutput(conversation.embedding)
    )


def embedding(p: PoolingRequestOutput) -> EmbeddingRequestOutput:
    return EmbeddingRequestOutput(p.request_id, p.prompt_token_ids, EmbeddingOutput(p.outputs.data))


def classification(p: PoolingRequestOutput, verdict: Verdict) -> ClassificationRequestOutput:
    probs = verdict.probabilities(p.outputs.data)
    label = verdict.labels[probs.index(max(probs))]
    output = ClassificationOutput(probs, label)
    return ClassificationRequestOutput(p.request_id, p.prompt_token_ids, output)


def scoring(
    first: PoolingRequestOutput, second: PoolingRequestOutput, score: float
) -> ScoringRequestOutput:
    ids = first.prompt_token_ids + (second.prompt_token_ids if second is not first else [])
    return ScoringRequestOutput(second.request_id, ids, ScoringOutput(score))
