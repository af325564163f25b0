"""The route table: every path the server answers, who may call it, and which file does the work."""

from __future__ import annotations

from quire.server import (
    adapters,
    admin,
    batches,
    conversations,
    files,
    looking,
    model_verbs,
    ollama,
    ollama_models,
    page_files,
    stored_chats,
)
from quire.server.app import ADMIN, KEY, PUBLIC, Handler, Route
from quire.server.cached_answers import cached_answers, forget_answers
from quire.server.chat import chat_completions
from quire.server.classify import classify, pooling
from quire.server.completions import completions
from quire.server.embeddings import embeddings
from quire.server.generate import generate
from quire.server.inside import inside
from quire.server.messages import count_tokens, messages
from quire.server.openapi import openapi
from quire.server.responses import responses
from quire.server.score import rerank, score
from quire.server.settings import ServeSettings
from quire.server.stored_responses import cancel_response, delete_response, stored_response


def routes(settings: ServeSettings) -> list[Route]:
    metrics_access = PUBLIC if settings.public_metrics else KEY
    return [
        Route("POST", "/v1/chat/completions", chat_completions),
        Route("POST", "/v1/completions", completions),
        Route("POST", "/v1/responses", responses),
        Route("POST", "/v1/embeddings", embeddings),
        Route("POST", "/v1/messages", messages, style="anthropic"),
        Route("POST", "/v1/messages/count_tokens", count_tokens, style="anthropic"),
        Route("POST", "/v1/generate", generate),
        Route("POST", "/score", score),
        Route("POST", "/v1/score", score),
        Route("POST", "/rerank", rerank),
        Route("POST", "/v1/rerank", rerank),
        Route("POST", "/v2/rerank", rerank),
        Route("POST", "/classify", classify),
        Route("POST", "/pooling", pooling),
        *_stored(),
        *_ollama(),
        Route("POST", "/v1/load_lora_adapter", adapters.load_adapter, ADMIN),
        Route("POST", "/v1/unload_lora_adapter", adapters.unload_adapter, ADMIN),
        Route("GET", "/v1/models", looking.models),
        Route("GET", "/v1/models/{}", looking.model),
        Route("GET", "/v1/metrics", looking.metrics_summary),
        Route("POST", "/tokenize", looking.tokenize),
        Route("POST", "/detokenize", looking.detokenize),
        Route("GET", "/health", looking.live, PUBLIC),
        Route("GET", "/live", looking.live, PUBLIC),
        Route("GET", "/ready", looking.ready, PUBLIC),
        Route("GET", "/metrics", looking.metrics, metrics_access),
        Route("GET", "/version", looking.version),
        Route("GET", "/openapi.json", openapi),
        Route("GET", "/inside", inside),
        Route("GET", "/admin/cache_news", admin.cache_news, ADMIN),
        Route("POST", "/admin/flush_cache", admin.flush_cache, ADMIN),
        Route("POST", "/admin/pause", admin.pause, ADMIN),
        Route("POST", "/admin/resume", admin.resume, ADMIN),
        Route("POST", "/admin/abort", admin.abort, ADMIN),
        Route("POST", "/admin/profile", admin.profile, ADMIN),
        Route("POST", "/admin/models/load", model_verbs.load_model, ADMIN),
        Route("POST", "/admin/models/park", model_verbs.park_model, ADMIN),
        Route("POST", "/admin/models/unload", model_verbs.unload_model, ADMIN),
        Route("GET", "/", page_files.index, PUBLIC),
        Route("GET", "/page/{}", page_files.asset, PUBLIC),
    ]


def _stored() -> list[Route]:
    return [
        Route("GET", "/v1/responses/{}", stored_response),
        Route("POST", "/v1/responses/{}", cancel_response),
        Route("DELETE", "/v1/responses/{}", delete_response),
        Route("GET", "/v1/chat/completions", stored_chats.stored_chats),
        Route("GET", "/v1/chat/completions/{}", stored_chats.stored_chat),
        Route("POST", "/v1/chat/completions/{}", stored_chats.update_chat),
        Route("DELETE", "/v1/chat/completions/{}", stored_chats.delete_chat),
        Route("POST", "/v1/conversations", conversations.create_conversation),
        Route("GET", "/v1/conversations/{}", conversations.conversation),
        Route("POST", "/v1/conversations/{}", conversations.change_conversation),
        Route("DELETE", "/v1/conversations/{}", conversations.delete_conversation),
        Route("GET", "/v1/answer_cache", cached_answers),
        Route("DELETE", "/v1/answer_cache", forget_answers),
        Route("POST", "/v1/files", files.upload, spools=True),
        Route("GET", "/v1/files", files.files),
        Route("GET", "/v1/files/{}", files.file),
        Route("DELETE", "/v1/files/{}", files.delete_file),
        Route("POST", "/v1/batches", batches.create_batch),
        Route("GET", "/v1/batches", batches.batches),
        Route("GET", "/v1/batches/{}", batches.batch),
        Route("POST", "/v1/batches/{}", batches.cancel_batch),
    ]


def batch_handlers() -> dict[str, Handler]:
    """What a line of a batch may ask for."""
    return {
        "/v1/chat/completions": chat_completions,
        "/v1/completions": completions,
        "/v1/embeddings": embeddings,
        "/v1/responses": responses,
    }


def _ollama() -> list[Route]:
    style = "ollama"
    return [
        Route("POST", "/api/generate", ollama.generate, style=style),
        Route("POST", "/api/chat", ollama.chat, style=style),
        Route("POST", "/api/embed", ollama.embed, style=style),
        Route("POST", "/api/embeddings", ollama.embeddings, style=style),
        Route("GET", "/api/tags", ollama_models.tags, style=style),
        Route("GET", "/api/ps", ollama_models.ps, style=style),
        Route("GET", "/api/version", ollama_models.version, style=style),
        Route("POST", "/api/show", ollama_models.show, style=style),
        Route("POST", "/api/pull", ollama_models.pull, style=style),
        Route("POST", "/api/push", ollama_models.change, style=style),
        Route("POST", "/api/create", ollama_models.change, style=style),
        Route("POST", "/api/copy", ollama_models.change, style=style),
        Route("DELETE", "/api/delete", ollama_models.change, style=style),
    ]
