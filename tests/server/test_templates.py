"""Chat templates: what clients may hand them, and broken ones told of at the start."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineArgs
from quire.server import api_main
from quire.server.settings import ServeSettings
from tests.server.fakes import Bench, chat_tokenizer
from tests.text.tiny_tokenizers import byte_level

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def ask(bench: Bench, **body: Any) -> Any:
    return bench.post(CHAT, {"messages": HI, "max_tokens": 2, **body})


# ------------------------------------------------------------ values from clients


OURS = """
self tokenize chat_template messages tools documents add_generation_prompt continue_final_message
raise_exception strftime_now bos_token eos_token pad_token unk_token
"""


@pytest.mark.parametrize("name", OURS.split())
def test_names_of_our_own_are_refused_by_name(name: str) -> None:
    """Red when a client's value collides with one of ours: a 500, or silently one of the two."""
    bench = Bench()
    reply = ask(bench, chat_template_kwargs={name: 1})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == "chat_template_kwargs" and f"with {name}:" in error["message"]
    assert bench.link.submitted == []


@pytest.mark.parametrize("name", ["variables", "text", "checked", "definitions", "source", "cls"])
def test_other_names_are_the_templates_business(name: str) -> None:
    """Red when a name is taken by some function on the way to the template."""
    bench = Bench(trust_request_chat_template=True)
    template = f"{{{{ messages[0].content }}}} {{{{ {name} }}}}"
    reply = ask(bench, chat_template=template, chat_template_kwargs={name: "there"})
    assert reply.status_code == 200, reply.text
    assert bench.link.prompt() == "hi there"


@pytest.mark.parametrize("name", ["a-b", "", "_x", "__class__", "1a"])
def test_names_no_template_can_have_are_refused(name: str) -> None:
    reply = ask(Bench(), chat_template_kwargs={name: 1})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ ''.__class__ }}", "{% for i in range(10**9) %}{% endfor %}"]
)
def test_a_bad_template_is_its_senders_mistake(template: str) -> None:
    """Red when a template that a client sent, and that does not work, is a 500."""
    reply = ask(Bench(trust_request_chat_template=True), chat_template=template)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "chat_template"


# ------------------------------------------------------------ at the start

BROKEN = "{% for m in messages %}{{ m.content }}"
FINE = "{{ messages[0].content }}"


def start(monkeypatch: pytest.MonkeyPatch, folder: Path, template: str | None = None) -> int:
    """The API process up to the point where it would serve."""
    engine = EngineArgs(model=str(folder))
    settings = ServeSettings(engine=engine, chat_template=template, log_level="error")
    monkeypatch.setattr(sys, "argv", ["api", "1"])
    monkeypatch.setattr(api_main, "begin", lambda kind, fd: settings)
    monkeypatch.setattr(api_main, "open_verdict", lambda args: None)
    monkeypatch.setattr(api_main, "_allow_many_files", lambda: None)
    monkeypatch.setattr(api_main, "configure_logging", lambda *given: None)

    async def serve(*given: object) -> int:
        return 0

    monkeypatch.setattr(api_main, "_serve", serve)
    return api_main.main()


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": BROKEN},
        {
            "chat_template": [
                {"name": "default", "template": FINE},
                {"name": "tool_use", "template": BROKEN},
            ]
        },
    ],
    ids=str,
)
def test_a_broken_template_in_the_models_folder_is_said_at_the_start(
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Red when the server starts and every conversation is a 500."""
    write_model(tmp_path, config)
    assert start(monkeypatch, tmp_path) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: the chat template ") and told.count("\n") == 1
    assert "--chat-template FILE" in told
    # The way out is one.
    assert start(monkeypatch, tmp_path, FINE) == 0
    assert start(monkeypatch, tmp_path, BROKEN) == 2


@pytest.mark.parametrize("config", [{}, {"chat_template": FINE}], ids=str)
def test_other_models_start(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a model without a template, or with one that works, does not start."""
    assert start(monkeypatch, write_model(tmp_path, config)) == 0


@pytest.mark.parametrize(
    "template",
    [
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}",
        "{{ messages[7].content.x }}",
        "{{ messages.__class__ }}",
    ],
)
def test_a_template_that_refuses_our_message_is_only_warned_of(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a template that wants a system message keeps a server from starting."""
    told: list[str] = []
    monkeypatch.setattr(api_main, "log_event", lambda event, **fields: told.append(event))
    api_main.check_templates(chat_tokenizer(template))
    assert told == ["chat_template_refuses_probe"]
