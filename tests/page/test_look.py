"""Themes, narrow screens, keyboards, and the policy the page must live under."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.page.conftest import Console, OpenPage
from tests.page.fake_engine import FakeEngine
from tests.page.mock_server import MockServer, Reply
from tests.page.test_server import batch

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDE_TEXT = "```\n" + "x" * 300 + "\n```\n\n" + "y" * 300 + "\n\n| a | b |\n|--|--|\n|" + "z" * 200


def background(page: Page) -> list[int]:
    colour: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return [int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]


def contrast_of(page: Page, selector: str) -> float:
    """WCAG contrast of a text against the page's background."""
    ratio: float = page.evaluate(
        """(selector) => {
          const light = (colour) => {
            const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((v) => {
              const c = v / 255;
              return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
            });
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const text = light(getComputedStyle(document.querySelector(selector)).color);
          const ground = light(getComputedStyle(document.body).backgroundColor);
          return (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
        }""",
        selector,
    )
    return ratio


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_follows_the_system(open_page: OpenPage, scheme: str) -> None:
    """Red when a theme is lost or its text becomes too pale to read."""
    page = open_page(color_scheme=scheme)
    assert (sum(background(page)) > 384) == (scheme == "light")
    for selector in ("#tab-chat", "#tab-inside", "#chat-kept", "#chat-title", ".welcome a"):
        assert contrast_of(page, selector) >= 4.5, selector


def test_the_switch_wins_and_is_remembered(open_page: OpenPage) -> None:
    """Red when the manual theme does not override the system, or forgets on reload."""
    page = open_page(color_scheme="light")
    page.click("#theme")  # light
    page.click("#theme")  # dark
    assert sum(background(page)) < 384
    page.reload()
    assert sum(background(page)) < 384
    page.click("#theme")  # the system again
    assert sum(background(page)) > 384


@pytest.mark.parametrize("width", [360, 768, 1024])
@pytest.mark.parametrize("view", ["chat", "inside", "compare", "server"])
def test_no_sideways_scroll(open_page: OpenPage, mock: MockServer, view: str, width: int) -> None:
    """Red when something sticks out of a narrow screen."""
    engine = FakeEngine()
    engine.advance(200)
    mock.snapshot = engine.snapshot
    mock.reply = lambda body: Reply(pieces=(WIDE_TEXT,))
    mock.models[0] |= {"id": "m" * 90, "state": "failed", "reason": "r" * 200, "root": "m"}
    mock.batches = [batch("batch_" + "9" * 60, "in_progress", 3, 1, 10)]
    page = open_page(f"/#{view}", viewport={"width": width, "height": 740}, has_touch=True)
    if view == "chat":
        page.fill("#prompt", "w" * 200)
        page.press("#prompt", "Enter")
        page.locator(".answer-figures").wait_for()
    elif view == "inside":
        page.locator(".lane").first.wait_for()
    elif view == "server":
        page.locator("#server-batches .row").wait_for()
    else:
        page.click("text=Run both")
        page.locator(".verdict table").wait_for()
    sizes = page.evaluate(
        """() => ['html', 'body', 'main', '#scroller'].map((s) => document.querySelector(s))
             .map((e) => [e.scrollWidth, e.clientWidth])"""
    )
    assert all(scroll <= client for scroll, client in sizes), sizes
    page.screenshot()  # draws everything once at this width


def test_drawers_on_a_phone(open_page: OpenPage) -> None:
    """Red when settings or conversations cannot be reached, or cover the text for good."""
    page = open_page(viewport={"width": 360, "height": 740}, has_touch=True)
    assert not page.is_visible("#shelf")
    assert not page.is_visible("#chat-knobs")
    page.tap("#knobs-toggle")
    page.locator("#chat-temperature").fill("0.4")
    page.tap("#knobs-toggle")
    assert not page.is_visible("#chat-knobs")
    page.tap("#shelf-toggle")
    page.tap("#chat-new")
    assert not page.is_visible("#shelf")


def test_by_keyboard_alone(open_page: OpenPage, mock: MockServer) -> None:
    """Red when a view, a message or a stop needs a mouse."""
    engine = FakeEngine()
    mock.snapshot = engine.snapshot
    mock.reply = lambda body: Reply(delay_s=0.02, is_endless=True)
    page = open_page()
    page.keyboard.press("Tab")  # skip link
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "tab-chat"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#panel-inside")
    assert page.get_attribute("#tab-inside", "aria-selected") == "true"
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#panel-compare")
    page.keyboard.press("End")
    assert page.is_visible("#panel-server")
    page.keyboard.press("Home")
    assert page.is_visible("#panel-chat")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "prompt":
            break
    page.keyboard.type("line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    page.keyboard.press("Enter")
    page.get_by_text("Hello there").first.wait_for()
    assert mock.bodies[0]["messages"][0]["content"] == "line one\nline two"
    page.keyboard.press("Escape")
    assert mock.disconnected.wait(3)


def test_explanations(open_page: OpenPage, mock: MockServer) -> None:
    """Red when a term is not explained to mouse, keyboard and finger alike."""
    engine = FakeEngine()
    engine.advance(100)
    mock.snapshot = engine.snapshot
    page = open_page("/#inside", has_touch=True)
    page.hover(".legend >> text=cached >> nth=0")
    assert "match the start of some prompt" in page.inner_text("#tip")
    page.mouse.move(2, 2)
    page.locator("#tip").wait_for(state="hidden")
    page.tap("#pool .term >> nth=0")
    assert "keys and values" in page.inner_text("#tip")
    unexplained = page.evaluate("""() => {
      const tip = document.querySelector('#tip');
      return [...document.querySelectorAll('.term')].filter((term) => {
        tip.textContent = '';
        term.dispatchEvent(new PointerEvent('pointerover', { bubbles: true }));
        return !tip.textContent;
      }).map((term) => term.dataset.hint);
    }""")
    assert unexplained == []


def test_the_policy_is_in_force(page: Page, console: Console) -> None:
    """Red when the tests run without the policy the server will send."""
    console.expect("Content Security Policy")
    page.evaluate("""() => {
      const script = document.createElement('script');
      script.textContent = 'document.title = "owned"';
      document.body.append(script);
    }""")
    assert page.title() == "Quire"
    assert any("Content Security Policy" in error for error in console.errors)


def test_controls_have_names(open_page: OpenPage, mock: MockServer) -> None:
    """Red when a control says nothing to someone who cannot see it."""
    engine = FakeEngine()
    engine.advance(100)
    mock.snapshot = engine.snapshot
    page = open_page("/#inside")
    page.locator(".lane").first.wait_for()
    nameless = page.evaluate("""() =>
      [...document.querySelectorAll('button, input, select, textarea')]
      .filter((e) => !(e.ariaLabel || e.labels?.length || e.textContent.trim()))
      .map((e) => e.outerHTML)""")
    assert nameless == []
