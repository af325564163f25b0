from __future__ import annotations

import io
import json
import os
import signal

import pytest

from quire.cli.main import main
from quire.cli.session import ChatSession, stop_on_ctrl_c
from quire.errors import BadRequest
from quire.llm import LLM
from quire.params import SamplingParams
from tests.cli.conftest import ENGINE


@pytest.fixture(scope="module")
def llm(tiny):
    return LLM(tiny, load_format="dummy", num_threads=1, kv_cache_memory=8 << 20, page_size=4)


@pytest.fixture
def session(llm):
    return ChatSession(llm, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))


def chat(tiny, lines, monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["chat", tiny, *ENGINE, "--max-tokens", "4", "--seed", "0", *words]) == 0
    return capsys.readouterr()


def test_piped_lines_are_one_conversation(tiny, monkeypatch, capsys):
    shown = chat(tiny, "hello world\n\nand more\n", monkeypatch, capsys, "--json")
    first, second = (json.loads(line) for line in shown.out.splitlines())
    assert (first["message"], second["message"]) == ("hello world", "and more")
    assert first["num_tokens"] == 4 and first["ttft"] > 0
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] == 16  # one page of the first turn
    assert second["prompt_tokens"] > first["prompt_tokens"]


def test_commands(tiny, monkeypatch, capsys):
    lines = ["/set temperature 0", "hi", "/stats", "/set colour 3", "/nope"]
    lines += ["/system be kind", "/reset", "/help", "/exit", "no"]
    shown = chat(tiny, "\n".join(lines), monkeypatch, capsys)
    told = shown.err
    assert "(temperature = 0)" in told
    assert "1 answers · 4 tokens out" in told
    assert "cannot set 'colour'; known: temperature" in told
    assert "unknown command /nope" in told
    assert "/set NAME VALUE" in told
    assert shown.out.count("tok/s") == 1  # nothing was answered after /exit


def test_demo_shows_a_cache_hit(tiny, capsys):
    # The demo's questions are longer in bytes than in real tokens: give them room.
    assert main(["chat", tiny, *ENGINE, "--demo", "--json", "--max-tokens", "8"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] > first["prompt_tokens"] // 2


def test_stopping_keeps_what_was_said_and_leaves_no_request(session):
    seen = []
    pieces = session.ask("tell me", is_stopped=lambda: len(seen) >= 2)
    for piece in pieces:
        seen.append(piece)
    assert session.last.num_tokens == 2
    assert session.last.finish_reason == "abort"
    assert session.turns[-1] == {"role": "assistant", "content": "".join(seen)}
    assert session.llm.stats().num_running == 0


def test_a_prompt_too_long_leaves_the_conversation_as_it_was(session):
    list(session.ask("fine"))
    before = list(session.turns)
    with pytest.raises(BadRequest, match="max_model_len"):
        list(session.ask("x" * 300))
    assert session.turns == before


def test_first_ctrl_c_asks_and_the_second_interrupts():
    before = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background
    with stop_on_ctrl_c() as is_stopped:
        assert not is_stopped()
        os.kill(os.getpid(), signal.SIGINT)
        assert is_stopped()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_system_prompt_comes_first(session):
    session.system = "be brief"
    list(session.ask("hi"))
    assert [m["role"] for m in session.messages] == ["system", "user", "assistant"]
