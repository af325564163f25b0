"""GET /openapi.json: the server described by what runs it, the route table and the body structs.

Paths, methods, access and error styles come from the routes, bodies from msgspec's own schemas,
narrowed by `openapi_schemas.py` to what is really taken. Only what neither knows is listed here:
which struct a path reads, and what kinds of answer it gives.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.server import fields, ollama_input, sse
from quire.server.adapters import LoadFields, UnloadFields
from quire.server.app import ADMIN, PUBLIC, Route
from quire.server.batches import BatchFields
from quire.server.conversations import ConversationFields
from quire.server.files import PURPOSES
from quire.server.http import JSON_TYPE, NDJSON_TYPE, HttpRequest, Reply
from quire.server.messages_input import CountTokensFields, MessagesFields
from quire.server.model_verbs import ModelFields
from quire.server.openapi_schemas import INSIDES, Schema, narrow
from quire.server.responses_input import ResponsesFields
from quire.server.server import PLACEHOLDERS, Server
from quire.server.stored_chats import MetadataFields
from quire.version import __version__

EVENTS = "text/event-stream"
REFERENCE = "#/components/schemas/{name}"
PATH_VALUE = "name"  # what the open end of a path is called in the document

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": fields.ChatFields,
    "/v1/completions": fields.CompletionFields,
    "/v1/responses": ResponsesFields,
    "/v1/embeddings": fields.EmbeddingFields,
    "/v1/messages": MessagesFields,
    "/v1/messages/count_tokens": CountTokensFields,
    "/v1/generate": fields.GenerateFields,
    "/score": fields.ScoreFields,
    "/v1/score": fields.ScoreFields,
    "/rerank": fields.RerankFields,
    "/v1/rerank": fields.RerankFields,
    "/v2/rerank": fields.RerankFields,
    "/classify": fields.ClassifyFields,
    "/pooling": fields.PoolingFields,
    "/v1/batches": BatchFields,
    "/v1/load_lora_adapter": LoadFields,
    "/v1/unload_lora_adapter": UnloadFields,
    **{f"/admin/models/{verb}": ModelFields for verb in ("load", "park", "unload")},
    "/v1/conversations": ConversationFields,
    "/v1/conversations/{}": ConversationFields,
    "/v1/chat/completions/{}": MetadataFields,
    "/tokenize": fields.TokenizeFields,
    "/detokenize": fields.DetokenizeFields,
    "/api/generate": ollama_input.OllamaGenerateFields,
    "/api/chat": ollama_input.OllamaChatFields,
    "/api/embed": ollama_input.OllamaEmbedFields,
    "/api/embeddings": ollama_input.OllamaEmbeddingsFields,
    "/api/show": ollama_input.OllamaModelFields,
    "/api/pull": ollama_input.OllamaModelFields,
    "/api/push": ollama_input.OllamaModelFields,
    "/api/create": ollama_input.OllamaModelFields,
    "/api/copy": ollama_input.OllamaModelFields,
}
# What a path answers with, where it is not JSON alone.
MEDIA: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": (JSON_TYPE, EVENTS),
    "/v1/completions": (JSON_TYPE, EVENTS),
    "/v1/responses": (JSON_TYPE, EVENTS),
    "/v1/messages": (JSON_TYPE, EVENTS),
    "/v1/generate": (JSON_TYPE, EVENTS),
    "/api/generate": (JSON_TYPE, NDJSON_TYPE),
    "/api/chat": (JSON_TYPE, NDJSON_TYPE),
    "/inside": (EVENTS,),
    "/metrics": ("text/plain",),
    "/v1/load_lora_adapter": ("text/plain",),
    "/v1/unload_lora_adapter": ("text/plain",),
    "/v1/files/{}": (JSON_TYPE, "application/octet-stream"),
    "/": ("text/html",),
    "/page/{}": ("text/html", "text/javascript", "text/css", "image/svg+xml"),
}
SCORED = ("id", "object", "created", "model", "data", "usage")
RANKED = ("id", "model", "results", "usage")
LISTED = ("object", "data", "has_more")
BATCH = ("id", "object", "endpoint", "status", "input_file_id", "request_counts", "created_at")
# Keys of a JSON answer that are always there.
ANSWERS: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("id", "object", "created", "model", "choices", "usage"),
    "/v1/completions": ("id", "object", "created", "model", "choices", "usage"),
    "/v1/responses": ("id", "object", "created_at", "status", "model", "output", "usage"),
    "/v1/embeddings": ("object", "model", "data", "usage"),
    "/v1/messages": ("id", "type", "role", "model", "content", "stop_reason", "usage"),
    "/v1/messages/count_tokens": ("input_tokens",),
    "/v1/generate": ("id", "text", "finish_reason", "usage"),
    "/score": SCORED,
    "/v1/score": SCORED,
    "/rerank": RANKED,
    "/v1/rerank": RANKED,
    "/v2/rerank": RANKED,
    "/classify": SCORED,
    "/pooling": SCORED,
    "/v1/models": ("object", "data"),
    "/v1/models/{}": ("id", "object", "created", "owned_by"),
    "/v1/batches/{}": BATCH,
    "/v1/responses/{}": ("id", "object"),
    "/v1/chat/completions/{}": ("object",),
    "/v1/conversations": ("id", "object", "created_at", "metadata"),
    "/v1/conversations/{}": (),
    "/v1/answer_cache": ("object",),
    "/tokenize": ("count", "max_model_len", "tokens"),
    "/detokenize": ("prompt",),
    "/health": ("status",),
    "/live": ("status",),
    "/ready": ("status",),
    "/version": ("version",),
    "/api/generate": ("model", "created_at", "response", "done", "done_reason"),
    "/api/chat": ("model", "created_at", "message", "done", "done_reason"),
    "/api/embed": ("model", "embeddings"),
    "/api/embeddings": ("embedding",),
    "/api/tags": ("models",),
    "/api/ps": ("models",),
    "/api/version": ("version",),
    "/api/show": ("template", "details", "model_info", "capabilities"),
}
QUERIES: dict[str, Schema] = {
    "/inside": {
        "name": "hz",
        "in": "query",
        "description": "Pictures a second.",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 10, "default": 5},
    }
}
UPLOAD: Schema = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"type": "string", "enum": list(PURPOSES)},
                },
            }
        }
    },
}
STATUSES = {
    400: "The request is wrong; the message says what and why.",
    401: "The API key is missing or wrong.",
    403: "This needs an admin key.",
    404: "No such model, path, or thing of that id.",
    405: "The path is there, for another method.",
    408: "The body did not arrive in time.",
    409: "Not in the state the engine or the batch is in; the message says why.",
    413: "The body is too large.",
    414: "The path and query are too long.",
    415: "Bodies must not be compressed.",
    429: "The server is full, and Retry-After says when to try again; or a key's quota is.",
    431: "The headers are too large.",
    500: "This request failed on our side; others go on.",
    503: "The engine is loading, restarting or shutting down.",
    504: "The request's deadline passed.",
    507: "The disk cannot take it.",
}
ERRORS = {"anthropic": "AnthropicError", "ollama": "OllamaError"}  # by style; else "Error"
ALWAYS = (405, 408, 413, 414, 415, 431, 500)  # from what happens around every handler
ENGINE = (429, 503, 504)
EXTRA = {
    "/ready": (503,),
    "/": (404,),
    "/page/{}": (404,),
    "/v1/models/{}": (404,),
    "/admin/profile": (409,),
    "/v1/files": (404, 507),
    "/v1/files/{}": (404,),
    "/v1/batches": (404,),
    "/v1/batches/{}": (404, 409),
    "/v1/responses": (409,),
    "/v1/responses/{}": (404,),
    "/v1/chat/completions": (404,),
    "/v1/chat/completions/{}": (404,),
    "/v1/answer_cache": (404,),
    "/v1/conversations": (404,),
    "/v1/conversations/{}": (404,),
}


async def openapi(request: HttpRequest, server: Server) -> Reply:
    from quire.server.routes import routes  # which imports this file

    return Reply(sse.encode(document(routes(server.settings), server)))


def document(routes: Sequence[Route], server: Server) -> Schema:
    """The whole OpenAPI document."""
    _, schemas = msgspec.json.schema_components(BODIES.values(), ref_template=REFERENCE)
    models = () if server.settings.accept_any_model else (*server.model_names, *PLACEHOLDERS)
    narrow(schemas, server.limits, models)
    paths: dict[str, Schema] = {}
    for route in routes:
        path = route.path.replace("{}", f"{{{PATH_VALUE}}}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": {**schemas, **INSIDES},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


# ------------------------------------------------------------ operations


def _operation(route: Route) -> Schema:
    made: Schema = {
        "operationId": _operation_id(route),
        "summary": _summary(route),
        "responses": {"200": _success(route)} | _failures(route),
    }
    parameters = [QUERIES[route.path]] if route.path in QUERIES else []
    if route.path.endswith("{}"):
        named = {"type": "string", "minLength": 1}
        parameters.append({"name": PATH_VALUE, "in": "path", "required": True, "schema": named})
    if parameters:
        made["parameters"] = parameters
    if route.access == PUBLIC:
        made["security"] = []
    if route.method == "POST":
        made["requestBody"] = UPLOAD if route.spools else _body(route.path)
    return made


def _operation_id(route: Route) -> str:
    words = route.path.replace("{}", PATH_VALUE).replace(".", "_").split("/")
    return "_".join([route.method.lower(), *(word for word in words if word)])


def _summary(route: Route) -> str:
    said = (route.handler.__doc__ or f"{route.method} {route.path}").strip()
    return said.splitlines()[0]


def _body(path: str) -> Schema:
    if path not in BODIES:
        return {"required": False, "content": {JSON_TYPE: {"schema": {"type": "object"}}}}
    reference = {"$ref": REFERENCE.format(name=BODIES[path].__name__)}
    return {"required": True, "content": {JSON_TYPE: {"schema": reference}}}


def _success(route: Route) -> Schema:
    content: Schema = {}
    is_list = route.method == "GET" and route.path in BODIES and not route.path.endswith("{}")
    for media in (JSON_TYPE,) if is_list else MEDIA.get(route.path, (JSON_TYPE,)):
        schema: Schema = {"type": "string"}
        if media == JSON_TYPE:
            keys = LISTED if is_list else ANSWERS.get(route.path, ())
            schema = {"type": "object", "required": list(keys)}
        content[media] = {"schema": schema}
    return {"description": "Done.", "content": content}


def _failures(route: Route) -> Schema:
    codes = {400, *ALWAYS, *EXTRA.get(route.path, ())}
    if route.access != PUBLIC:
        codes.add(401)
    if route.access == ADMIN:
        codes.add(403)
    if route.method == "POST":
        codes |= {404, *ENGINE}
    schema: Schema = {"$ref": REFERENCE.format(name=ERRORS.get(route.style, "Error"))}
    if route.path == "/ready":
        schema = {"type": "object"}  # its 503 is no error body, but why it is not ready
    return {
        str(code): {"description": STATUSES[code], "content": {JSON_TYPE: {"schema": schema}}}
        for code in sorted(codes)
    }
