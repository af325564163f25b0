"""POST /classify and /pooling: what a classification head says of texts or conversations."""

from __future__ import annotations

from typing import Any

from quire.errors import BadRequest, NotSupported
from quire.models.sequence_head import Verdict
from quire.server import sse
from quire.server.completions import items_of
from quire.server.embeddings import check_shape, finished, packed
from quire.server.fields import ClassifyFields, PoolingFields, decode
from quire.server.http import HttpRequest, Reply
from quire.server.pooled import PoolJob, check_pooling, listing, pool
from quire.server.prompting import render
from quire.server.server import Server

EMBED, CLASSIFY = "embed", "classify"


async def classify(request: HttpRequest, server: Server) -> Reply:
    """The labels of texts, or of a conversation, and how likely each is."""
    fields = decode(request, ClassifyFields)
    model = server.check_model(fields.model, request)
    verdict = _verdict(server)
    job = PoolJob("classify", fields.priority or 0, fields.truncate_prompt_tokens)
    found = await pool(request, server, await _prompts(fields, server), job)
    probs = found.vectors
    if fields.use_activation is not False:
        probs = [verdict.probabilities(vector) for vector in found.vectors]
    data = [
        {
            "index": i,
            "label": verdict.labels[vector.index(max(vector))],
            "probs": vector,
            "num_classes": len(verdict.labels),
        }
        for i, vector in enumerate(probs)
    ]
    return Reply(sse.encode(listing("classify", request, model, data, found)))


async def pooling(request: HttpRequest, server: Server) -> Reply:
    """The numbers a model makes of texts: its head's where it has one, else an embedding."""
    fields = decode(request, PoolingFields)
    model = server.check_model(fields.model, request)
    task = fields.task or (EMBED if server.verdict is None else CLASSIFY)
    if task not in (EMBED, CLASSIFY):
        raise BadRequest(f"got task={task[:40]!r}, want {EMBED} or {CLASSIFY}", param="task")
    check_shape(fields.encoding_format, fields.dimensions, server)
    kind = "classify" if task == CLASSIFY else check_pooling(fields.pooling)
    verdict = _verdict(server) if task == CLASSIFY else None
    job = PoolJob(kind, fields.priority or 0, fields.truncate_prompt_tokens)
    found = await pool(request, server, await _prompts(fields, server), job)
    vectors = found.vectors
    if verdict is None:
        vectors = [finished(v, fields.dimensions, fields.normalize is not False) for v in vectors]
    elif fields.use_activation is not False:
        vectors = [verdict.probabilities(vector) for vector in vectors]
    as_base64 = fields.encoding_format == "base64"
    data: list[dict[str, Any]] = [
        {"index": i, "object": "pooling", "data": packed(v) if as_base64 else v}
        for i, v in enumerate(vectors)
    ]
    return Reply(sse.encode(listing("pool", request, model, data, found)))


def _verdict(server: Server) -> Verdict:
    if server.verdict is None:
        raise NotSupported(
            f"{server.model_names[0]} has no classification head; serve a model of a"
            " ...ForSequenceClassification architecture, or use /v1/embeddings or /score"
        )
    return server.verdict


async def _prompts(fields: ClassifyFields, server: Server) -> list[Any]:
    if (fields.input is None) == (fields.messages is None):
        raise BadRequest("want either input or messages", param="input")
    if fields.input is not None:
        return items_of(fields.input, "input")
    assert fields.messages is not None
    # A conversation is judged as it stands: nobody is asked to go on.
    options = {"add_generation_prompt": fields.add_generation_prompt is True}
    text = await render(server, fields.messages, [], options)
    return [await server.encode(text, "messages", add_special_tokens=False)]
