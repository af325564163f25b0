"""What can be asked without generating: health, models, version, metrics, tokenisation."""

from __future__ import annotations

from typing import Any

from quire.errors import BadRequest
from quire.obs.exposition import merged
from quire.routing.settings import AUTO
from quire.server import sse
from quire.server.fields import DetokenizeFields, TokenizeFields, decode
from quire.server.http import HttpRequest, Reply
from quire.server.prompting import render
from quire.server.server import Server
from quire.text.tools.definitions import check_tools
from quire.version import __version__


async def live(request: HttpRequest, server: Server) -> Reply:
    """The process answers. A restarting engine does not make it unwell."""
    return Reply(sse.encode({"status": "ok"}))


async def ready(request: HttpRequest, server: Server) -> Reply:
    """The engine is loaded and making progress, and we are taking requests."""
    models = server.models
    why = server.link.why_not_ready() if models is None else models.why_not_ready()
    why = "draining" if server.is_draining else why
    if why is None:
        return Reply(sse.encode({"status": "ready"}))
    return Reply(sse.encode({"status": "not ready", "reason": why}), 503)


async def version(request: HttpRequest, server: Server) -> Reply:
    return Reply(sse.encode({"version": __version__}))


async def models(request: HttpRequest, server: Server) -> Reply:
    return Reply(sse.encode({"object": "list", "data": list(_listed(server).values())}))


async def model(request: HttpRequest, server: Server) -> Reply:
    """Whatever requests may name, it is there; `root` is what answers."""
    name = request.path_value
    found = _listed(server).get(name)
    if found is None:
        server.check_model(name, request)
        found = _model(name, server)
    return Reply(sse.encode(found))


def _listed(server: Server) -> dict[str, dict[str, Any]]:
    """Models and adapters by name; of several models with their states."""
    if server.models is None:
        names = (*server.model_names, *server.link.adapters)
        return {name: _model(name, server) for name in names}
    found: dict[str, dict[str, Any]] = {}
    for one in server.models.servers:
        found |= {name: _model(name, one) for name in (*one.model_names, *one.link.adapters)}
    for name, state in server.models.states().items():
        listed = found.setdefault(name, {"id": name, "object": "model", "owned_by": "quire"})
        listed |= {"state": state.state, "reason": state.reason or None, "memory": state.memory}
    if (auto := server.models.auto) is not None:
        listed = {"id": AUTO, "object": "model", "created": server.created, "owned_by": "quire"}
        found[AUTO] = listed | {"state": found[auto.settings.small]["state"], "root": None}
    return found


def _model(name: str, server: Server) -> dict[str, Any]:
    hello, adapter = server.link.hello, server.link.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "quire",
        "root": server.model_names[0] if adapter is None else adapter.path,
        "parent": None if adapter is None else server.model_names[0],
        "max_model_len": hello.max_model_len if hello is not None else None,
    }


async def metrics(request: HttpRequest, server: Server) -> Reply:
    if server.models is None:
        text = (await server.all_metrics()).exposition()
    else:
        several = server.models.servers
        text = merged({one.model_names[0]: one.metrics.exposition() for one in several})
    return Reply(text, content_type="text/plain; version=0.0.4")


async def metrics_summary(request: HttpRequest, server: Server) -> Reply:
    found = await server.all_metrics()
    return Reply(sse.encode(found.summary()))


async def tokenize(request: HttpRequest, server: Server) -> Reply:
    fields = decode(request, TokenizeFields)
    server.check_model(fields.model, request)
    if (fields.prompt is None) == (fields.messages is None):
        raise BadRequest("want either prompt or messages", param="prompt")
    if fields.prompt is not None:
        special = fields.add_special_tokens is not False
        ids = await server.encode(fields.prompt, "prompt", special)
    else:
        assert fields.messages is not None
        text = await render(
            server,
            fields.messages,
            check_tools(fields.tools),
            {"add_generation_prompt": fields.add_generation_prompt is not False},
        )
        ids = await server.encode(text, "messages", add_special_tokens=False)
    body: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": server.max_model_len,
        "tokens": ids,
    }
    if fields.return_token_strs:
        body["token_strs"] = [server.tokenizer.id_to_token(i) for i in ids]
    return Reply(sse.encode(body))


async def detokenize(request: HttpRequest, server: Server) -> Reply:
    fields = decode(request, DetokenizeFields)
    server.check_model(fields.model, request)
    size = server.hello.vocab_size
    bad = next((i for i in fields.tokens if not 0 <= i < size), None)
    if bad is not None:
        raise BadRequest(f"got token id {bad}, want 0 <= id < {size}", param="tokens")
    text = await server.in_thread(
        lambda: server.tokenizer.decode(fields.tokens, skip_special_tokens=False),
        len(fields.tokens),
    )
    return Reply(sse.encode({"prompt": text}))
