"""POST /v1/embeddings: the served model's own hidden states, pooled over the text."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

from quire.errors import BadRequest
from quire.server import sse
from quire.server.completions import items_of
from quire.server.fields import EmbeddingFields, decode
from quire.server.http import HttpRequest, Reply
from quire.server.pooled import PoolJob, check_pooling, pool
from quire.server.server import Server


async def embeddings(request: HttpRequest, server: Server) -> Reply:
    fields = decode(request, EmbeddingFields)
    model = server.check_model(fields.model, request)
    check_shape(fields.encoding_format, fields.dimensions, server)
    job = PoolJob(
        check_pooling(fields.pooling), fields.priority or 0, fields.truncate_prompt_tokens
    )
    found = await pool(request, server, items_of(fields.input, "input"), job)
    is_scaled = fields.normalize is not False
    vectors = [finished(vector, fields.dimensions, is_scaled) for vector in found.vectors]
    return Reply(sse.encode(_body(vectors, fields, model, found.num_tokens)))


def check_shape(encoding: str | None, dimensions: int | None, server: Server) -> None:
    """How a vector is to be sent, and how much of it."""
    if encoding not in (None, "float", "base64"):
        raise BadRequest(
            f"got encoding_format={encoding[:40]!r}, want float or base64", param="encoding_format"
        )
    size = server.hello.hidden_size
    if dimensions is not None and not 1 <= dimensions <= size:
        raise BadRequest(f"got dimensions={dimensions}, want 1 to {size}", param="dimensions")


def finished(vector: list[float], dimensions: int | None, is_scaled: bool) -> list[float]:
    """Cut to the dimensions wanted, and scaled to length 1 unless told not to."""
    vector = vector[: dimensions or len(vector)]
    if not is_scaled:
        return vector
    length = math.sqrt(math.fsum(x * x for x in vector)) or 1.0
    return [x / length for x in vector]


def _body(
    vectors: list[list[float]], fields: EmbeddingFields, model: str, num_tokens: int
) -> dict[str, Any]:
    as_base64 = fields.encoding_format == "base64"
    return {
        "object": "list",
        "model": model,
        "data": [
            {"object": "embedding", "index": i, "embedding": packed(v) if as_base64 else v}
            for i, v in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def packed(vector: list[float]) -> str:
    """Little-endian float32, which OpenAI's own clients ask for."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
