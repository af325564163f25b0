"""What Ollama's clients ask about models: which there are, what one is, which are loaded.

There is one model, under the names it is served by; each also has the tag `latest`, without which
Ollama's clients show none. Models come and go with the server, so what would fetch, make or remove
one is refused with the command that does it.
"""

from __future__ import annotations

from typing import Any

from quire.errors import NotSupported
from quire.server import sse
from quire.server.fields import decode
from quire.server.http import HttpRequest, Reply
from quire.server.ollama_input import OllamaModelFields
from quire.server.ollama_output import rfc3339
from quire.server.problems import Problem
from quire.server.server import Server
from quire.text.reasoning import detect_reasoning
from quire.text.tools.formats import detect_tool_format
from quire.version import __version__

TAG = ":latest"
# The release of Ollama whose API this is: its clients refuse servers that say they are older.
OLLAMA_VERSION = "0.12.0"
NEVER = "9999-12-31T23:59:59Z"
SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForSequenceClassification")
PARAMETERS = {"repetition_penalty": "repeat_penalty"}  # Ollama's names where they differ


def served_name(server: Server, name: str | None, request: HttpRequest) -> str:
    """The name to answer with; raises 404 in Ollama's words for a model we do not serve."""
    if name is not None and name.removesuffix(TAG) in server.model_names:
        return name
    if name is not None and name.removesuffix(TAG) in server.link.adapters:
        server.check_model(name.removesuffix(TAG), request)
        return name
    try:
        return server.check_model(name, request)
    except Problem as problem:
        served = ", ".join(server.model_names)
        message = f"model '{(name or '')[:200]}' not found; served here: {served}"
        raise Problem(404, message, param="model", code=problem.code) from None


def _tagged(name: str) -> str:
    return name if ":" in name else name + TAG


async def tags(request: HttpRequest, server: Server) -> Reply:
    assert server.card is not None
    modified = {"modified_at": rfc3339(server.card.modified)}
    models = [_listed(name, server) | modified for name in server.model_names]
    return Reply(sse.encode({"models": models}))


async def ps(request: HttpRequest, server: Server) -> Reply:
    """The models that are loaded: none while the engine is not there."""
    models = []
    if server.link.why_not_ready() is None:
        hello = server.hello
        is_on_gpu = any(d.what == "device" and d.value != "cpu" for d in hello.decisions)
        for name in server.model_names:
            listed = _listed(name, server)
            listed["size_vram"] = listed["size"] if is_on_gpu else 0
            models.append(listed | {"expires_at": NEVER, "context_length": hello.max_model_len})
    return Reply(sse.encode({"models": models}))


def _listed(name: str, server: Server) -> dict[str, Any]:
    assert server.card is not None
    return {
        "name": _tagged(name),
        "model": _tagged(name),
        "size": server.card.num_bytes,
        "digest": server.card.digest,
        "details": _details(server),
    }


def _details(server: Server) -> dict[str, Any]:
    assert server.card is not None
    hello = server.link.hello  # none while it loads
    family = "" if hello is None else _family(hello.architecture)
    return {
        "parent_model": "",
        "format": server.card.format,
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "" if hello is None else _short(hello.num_params),
        "quantization_level": server.card.storage,
    }


def _family(architecture: str) -> str:
    for suffix in SUFFIXES:
        architecture = architecture.removesuffix(suffix)
    return architecture.lower()


def _short(count: int) -> str:
    """
    >>> _short(8_030_000_000), _short(134_520_000)
    ('8.0B', '134.52M')
    """
    if count >= 1_000_000_000:
        return f"{count / 1e9:.1f}B"
    return f"{count / 1e6:.2f}M"


# ------------------------------------------------------------ one model


async def show(request: HttpRequest, server: Server) -> Reply:
    fields = decode(request, OllamaModelFields)
    served_name(server, fields.model or fields.name, request)
    assert server.card is not None
    hello = server.hello
    family = _family(hello.architecture)
    body = {
        "modified_at": rfc3339(server.card.modified),
        "parameters": _parameters(server),
        "template": server.tokenizer.chat_template or "",
        "details": _details(server),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": hello.num_params,
            f"{family}.context_length": hello.max_model_len,
            f"{family}.embedding_length": hello.hidden_size,
            f"{family}.vocab_size": hello.vocab_size,
        },
        "capabilities": _capabilities(server),
    }
    return Reply(sse.encode(body))


def _parameters(server: Server) -> str:
    """What a request gets that says nothing, a line each."""
    values = {PARAMETERS.get(k, k): v for k, v in server.settings.default_sampling.items()}
    values["num_ctx"] = server.max_model_len
    return "\n".join(f"{name} {value}" for name, value in values.items())


def _capabilities(server: Server) -> list[str]:
    found = ["embedding"]
    if server.verdict is not None:
        return found
    settings, template = server.settings, server.tokenizer.chat_template
    found.insert(0, "completion")
    if settings.tool_call_parser or detect_tool_format(template) is not None:
        found.append("tools")
    if settings.reasoning_parser or detect_reasoning(template) is not None:
        found.append("thinking")
    return found


async def version(request: HttpRequest, server: Server) -> Reply:
    return Reply(sse.encode({"version": OLLAMA_VERSION, "quire": __version__}))


# ------------------------------------------------------------ refused


async def pull(request: HttpRequest, server: Server) -> Reply:
    """Refused: the operator chooses the model."""
    raise NotSupported(
        "models are not fetched over HTTP; on the server's machine run 'quire pull NAME', then"
        " 'quire serve NAME'"
    )


async def change(request: HttpRequest, server: Server) -> Reply:
    """Refused: models are files of the operator's."""
    raise NotSupported(
        "models are not made, copied, removed or uploaded over HTTP; start 'quire serve' with the"
        " folder or .gguf file you want, and --served-model-name to give it other names"
    )
