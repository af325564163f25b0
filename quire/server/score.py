"""POST /score and /rerank: how well texts go together, in the shapes of vLLM, Jina and Cohere.

A model with a head of one label reads two texts as one prompt (a cross-encoder). Any other embeds
each of them, and the cosine between the two is the score.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from quire.errors import BadRequest
from quire.server import sse
from quire.server.fields import RerankFields, ScoreFields, decode
from quire.server.http import HttpRequest, Reply
from quire.server.pooled import Pooled, PoolJob, check_count, check_pooling, listing, pool
from quire.server.server import Server
from quire.text.pairs import Pairing, cosine, encode_pair, pair_up


class Scores(NamedTuple):
    values: list[float]  # one for each pair
    pooled: Pooled


async def score(request: HttpRequest, server: Server) -> Reply:
    """How well one text goes with each of several, or each with its own."""
    fields = decode(request, ScoreFields)
    model = server.check_model(fields.model, request)
    first, second = fields.text_1, fields.text_2
    if first is None or second is None:
        first, second = fields.queries, fields.documents
    if first is None or second is None:
        raise BadRequest("want text_1 and text_2, or queries and documents", param="text_1")
    found = await _scores(request, server, pair_up(first, second), fields)
    data: list[dict[str, Any]] = [
        {"index": i, "object": "score", "score": value} for i, value in enumerate(found.values)
    ]
    return Reply(sse.encode(listing("score", request, model, data, found.pooled)))


async def rerank(request: HttpRequest, server: Server) -> Reply:
    """Documents in the order of how well they answer a query."""
    fields = decode(request, RerankFields)
    model = server.check_model(fields.model, request)
    documents = [_text_of(document, i) for i, document in enumerate(fields.documents)]
    if fields.top_n is not None and fields.top_n < 0:
        raise BadRequest(f"got top_n={fields.top_n}, want 0 for all, or more", param="top_n")
    found = await _scores(request, server, pair_up(fields.query, documents), fields)
    # Equal scores stay in the order they came.
    order = sorted(range(len(documents)), key=lambda i: -found.values[i])
    shown = order[: fields.top_n or len(order)]
    with_text = fields.return_documents is not False
    body = {
        "id": f"rerank-{request.id}",
        "model": model,
        "results": [
            {
                "index": i,
                "relevance_score": found.values[i],
                **({"document": {"text": documents[i]}} if with_text else {}),
            }
            for i in shown
        ],
        "usage": found.pooled.usage(),
    }
    return Reply(sse.encode(body))


def _text_of(document: str | dict[str, Any], index: int) -> str:
    """Cohere's older clients send objects."""
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise BadRequest(
            f"got documents[{index}] without a text, want a string or an object with one",
            param="documents",
        )
    return text


async def _scores(
    request: HttpRequest, server: Server, pairing: Pairing, fields: ScoreFields | RerankFields
) -> Scores:
    first, second, pairs = pairing
    cut, priority = fields.truncate_prompt_tokens, fields.priority or 0
    if server.verdict is None:
        job = PoolJob(check_pooling(fields.pooling), priority, cut, "text_1")
        found = await pool(request, server, [*first, *second], job)
        ones, others = found.vectors[: len(first)], found.vectors[len(first) :]
        return Scores([cosine(ones[i], others[j]) for i, j in pairs], found)
    verdict = server.verdict.for_pairs()
    check_count(len(pairs), server, "text_2")  # before any is tokenised
    prompts = [await _prompt(server, first[i], second[j]) for i, j in pairs]
    found = await pool(request, server, prompts, PoolJob("classify", priority, cut, "text_2"))
    if fields.use_activation is False:
        return Scores([vector[0] for vector in found.vectors], found)
    return Scores([verdict.probabilities(vector)[0] for vector in found.vectors], found)


async def _prompt(server: Server, first: str, second: str) -> list[int]:
    size = len(first) + len(second)
    server.check_text_size(size, "text_2")
    return await server.in_thread(lambda: encode_pair(server.tokenizer, first, second), size)
