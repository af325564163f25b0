"""The chat view against the mock: streaming, stopping, keeping, failing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.page.conftest import Console, OpenPage
from tests.page.mock_server import MockServer, Reply

if TYPE_CHECKING:
    from playwright.sync_api import Page

WORDS = tuple(f"word{i} " for i in range(50))


def ask(page: Page, text: str = "Hello?") -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def finished(page: Page, nth: int = 0) -> str:
    """Waits for the nth answer's figures; returns its text."""
    page.locator(".answer-figures").nth(nth).wait_for()
    return page.locator(".by-model .prose").nth(nth * 2 + 1).inner_text()


def test_an_answer_streams(page: Page, mock: MockServer) -> None:
    """Red when text waits for the end, or the figures under it are missing."""
    mock.reply = lambda body: Reply(pieces=WORDS, delay_s=0.03)
    ask(page)
    page.get_by_text("word3").wait_for()
    assert "word49" not in page.inner_text("#messages")
    assert page.inner_text("#send") == "Stop"
    text = finished(page)
    assert text.split() == [word.strip() for word in WORDS]
    figures = page.inner_text(".answer-figures")
    assert "TTFT" in figures
    assert "43.2 tokens/s" in figures
    assert "50 tokens" in figures
    assert "71% of it cached" in figures
    assert page.inner_text("#send") == "Send"
    sent = mock.bodies[0]
    assert sent["stream"] is True
    assert sent["stream_options"] == {"include_usage": True}
    assert sent["messages"] == [{"role": "user", "content": "Hello?"}]
    assert sent["model"] == "mock-model"


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_closes_the_connection(page: Page, mock: MockServer, how: str) -> None:
    """Red when stopping only hides the text and the engine goes on for nobody."""
    mock.reply = lambda body: Reply(pieces=WORDS, delay_s=0.01, is_endless=True)
    ask(page)
    page.get_by_text("word9").first.wait_for()
    assert not mock.disconnected.is_set()
    if how == "button":
        page.click("#send")
    else:
        page.keyboard.press("Escape")
    assert mock.disconnected.wait(3)
    assert "word9" in finished(page)
    assert "stopped" in page.inner_text(".answer-figures")
    assert page.locator(".failure:visible").count() == 0


def test_the_conversation_goes_along(page: Page, mock: MockServer) -> None:
    """Red when the model no longer sees what was said, or sees the system prompt twice."""
    page.fill("#system", "Be brief.")
    ask(page, "one")
    finished(page)
    ask(page, "two")
    finished(page, 1)
    roles = [message["role"] for message in mock.bodies[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert mock.bodies[1]["messages"][2]["content"] == "Hello there."


def test_settings_are_sent_only_when_set(page: Page, mock: MockServer) -> None:
    """Red when a blank field overrides the server's own default."""
    page.fill("#chat-temperature", "0.3")
    page.fill("#chat-seed", "7")
    page.fill("#chat-stop", "END\nSTOP")
    ask(page)
    finished(page)
    sent = mock.bodies[0]
    assert sent["temperature"] == 0.3
    assert sent["seed"] == 7
    assert sent["stop"] == ["END", "STOP"]
    assert not {"top_p", "top_k", "max_tokens", "logprobs"} & set(sent)
    page.reload()
    assert page.input_value("#chat-temperature") == "0.3"


def test_thinking_is_folded_away(page: Page, mock: MockServer) -> None:
    """Red when reasoning is mixed into the answer or sent back as if it were one."""
    mock.reply = lambda body: Reply(pieces=("Yes.",), reasoning=("Let me ", "think"))
    ask(page)
    assert finished(page) == "Yes."
    assert page.locator("details.thinking").get_attribute("open") is None
    page.click("details.thinking summary")
    assert "Let me think" in page.inner_text("details.thinking")
    ask(page, "more")
    finished(page, 1)
    assert mock.bodies[1]["messages"][1] == {"role": "assistant", "content": "Yes."}


def test_probabilities(page: Page, mock: MockServer) -> None:
    """Red when the tokens' odds are asked for but not shown."""
    mock.reply = lambda body: Reply(pieces=WORDS, has_logprobs=body.get("logprobs") is True)
    page.check("#chat-logprobs")
    ask(page)
    finished(page)
    assert mock.bodies[0]["top_logprobs"] == 5
    page.click("text=Probabilities")
    assert page.locator(".heat span").count() == len(WORDS)
    page.hover(".heat span >> nth=3")
    assert "likely" in page.inner_text("#tip")


def test_history_survives_a_reload(page: Page) -> None:
    """Red when a reload loses a conversation, its figures or which one was open."""
    ask(page, "Remember me")
    finished(page)
    page.reload()
    assert finished(page) == "Hello there."
    assert "TTFT" in page.inner_text(".answer-figures")
    assert page.inner_text(".chat-open") == "Remember me"


def test_rename_delete_export(page: Page, tmp_path: Path) -> None:
    """Red when one of the three loses or keeps what it should not."""
    for text in ("first", "second"):
        page.click("#chat-new")
        ask(page, text)
        finished(page)
    page.hover(".chat-list li >> nth=1")
    page.click("[aria-label='Rename first']")
    page.fill(".chat-list input", "renamed")
    page.press(".chat-list input", "Enter")
    with page.expect_download() as download:
        page.click("#chat-export")
    download.value.save_as(tmp_path / "chats.json")
    exported = json.loads((tmp_path / "chats.json").read_text())
    assert [chat["title"] for chat in exported["chats"]] == ["", "renamed"]
    assert exported["chats"][0]["messages"][1]["content"] == "Hello there."
    page.hover(".chat-list li >> nth=0")
    page.click("[aria-label='Delete second']")
    page.click(".chat-list .danger")
    page.reload()
    assert page.locator(".chat-open").all_inner_texts() == ["renamed"]


def test_an_answer_goes_on_in_its_own_conversation(page: Page, mock: MockServer) -> None:
    """Red when looking elsewhere stops an answer or drops it into the wrong place."""
    mock.reply = lambda body: Reply(pieces=WORDS, delay_s=0.02)
    ask(page, "long one")
    page.get_by_text("word2").wait_for()
    page.click("#chat-new")
    assert page.inner_text("#send") == "Send"
    assert "word2" not in page.inner_text("#messages")
    page.click(".chat-open")
    assert "word49" in finished(page)
    assert not mock.disconnected.is_set()


def test_without_storage(page: Page) -> None:
    """Red when a browser that keeps nothing cannot chat at all."""
    page.add_init_script(
        "for (const kind of ['localStorage', 'sessionStorage'])"
        " Object.defineProperty(window, kind, { get() { throw new Error('denied'); } });"
    )
    page.reload()
    ask(page, "anyone?")
    assert finished(page) == "Hello there."
    assert page.inner_text(".chat-open") == "anyone?"
    assert "gone on reload" in page.inner_text("#chat-kept")


def test_failures_say_why(page: Page, mock: MockServer, console: Console) -> None:
    """Red when a refusal, an error in the stream or a lost connection passes in silence."""
    console.expect("429")
    console.expect("ERR_INCOMPLETE_CHUNKED_ENCODING")
    replies = iter(
        [
            Reply(status=429, error="The queue is full."),
            Reply(pieces=("Half an",), error="The engine restarted."),
            Reply(pieces=("Half an",), is_cut=True),
            Reply(pieces=("All good",)),
        ]
    )
    mock.reply = lambda body: next(replies)
    ask(page)
    page.get_by_text("The queue is full. Try again in 2 s.").wait_for()
    page.click("button:text('Try again')")
    page.get_by_text("The engine restarted.").wait_for()
    assert "Half an" in page.inner_text("#messages")
    page.click("button:text('Try again')")
    page.get_by_text("ended before the answer did").wait_for()
    page.click("button:text('Try again')")
    page.get_by_text("All good").wait_for()
    assert page.locator(".failure:visible").count() == 0


def test_the_key_is_asked_for_and_not_kept(
    open_page: OpenPage, mock: MockServer, console: Console
) -> None:
    """Red when a key is not asked for, not sent, or written where it outlives the tab."""
    console.expect("401")
    mock.key = "open-sesame"
    page = open_page()
    page.fill("#key-input", "wrong")
    page.press("#key-input", "Enter")
    page.get_by_text("Wrong or missing API key").wait_for()
    page.fill("#key-input", "open-sesame")
    page.click("#key-use")
    page.locator("#model option").wait_for(state="attached")
    ask(page)
    assert finished(page) == "Hello there."
    assert "open-sesame" not in page.evaluate("JSON.stringify({...localStorage})")
    page.click("#chat-curl")
    curl = page.inner_text("#curl-text")
    assert "$QUIRE_API_KEY" in curl
    assert "open-sesame" not in curl


def test_curl_is_the_request(page: Page, mock: MockServer) -> None:
    """Red when the command shown would not send what the page sends."""
    page.fill("#chat-temperature", "0.5")
    ask(page, "It's me")
    finished(page)
    page.click("#chat-curl")
    curl = page.inner_text("#curl-text")
    assert f"{mock.url}/v1/chat/completions" in curl
    data = curl.split("-d '", 1)[1].rsplit("'", 1)[0].replace("'\\''", "'")
    assert json.loads(data) == mock.bodies[0]


def test_pieces_are_drawn_once_per_frame(page: Page) -> None:
    """Red when a hundred pieces between two frames mean a hundred redraws."""
    drawn = page.evaluate("""async () => {
      const { AnswerView } = await import('/page/answer.js');
      let drawn = 0;
      const view = new AnswerView({ onDraw: () => (drawn += 1) });
      for (let i = 0; i < 100; i += 1) view.update({ content: 'x'.repeat(i), reasoning: '' });
      await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
      return [drawn, view.element.querySelector('p').textContent.length];
    }""")
    assert drawn == [1, 99]


def test_long_answers_arrive_whole(page: Page, mock: MockServer) -> None:
    """Red when a fast stream blocks the page, loses text, or runs out of the reader's view."""
    pieces = tuple(f"Sentence {i} of a **long** answer.\n\n" for i in range(4000))
    mock.reply = lambda body: Reply(pieces=pieces)
    page.evaluate("""() => {
      window.longest = 0;
      new PerformanceObserver((list) => {
        const lengths = list.getEntries().map((task) => task.duration);
        window.longest = Math.max(window.longest, ...lengths);
      }).observe({ entryTypes: ['longtask'] });
    }""")
    ask(page)
    page.locator(".answer-figures").wait_for(timeout=30_000)
    assert page.locator(".by-model .prose p").count() == 4000
    assert page.evaluate("window.longest") < 1500
    at_end = "document.querySelector('#scroller')"
    gap = page.evaluate(f"(e => e.scrollHeight - e.scrollTop - e.clientHeight)({at_end})")
    assert gap < 100
