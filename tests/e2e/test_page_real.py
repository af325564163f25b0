"""The page against the real server: what the mock of `tests/page` promises must be so.

Skipped, with the reason, where Chromium or its driver is absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import Served, wait_until
from tests.page.conftest import Console, OpenPage, browser, opener

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser"]  # the fixture


@pytest.fixture
def open_page(browser: Browser, served: Served) -> Iterator[OpenPage]:
    with opener(browser, served, Console()) as open_:
        yield open_


def test_chat_streams_and_shows_its_figures(open_page: OpenPage) -> None:
    """Red when the server's chunks or timings are not what the page reads."""
    page = open_page()
    page.fill("#prompt", "Say something.")
    page.press("#prompt", "Enter")
    page.locator("#send", has_text="Send").wait_for(timeout=20_000)
    figures = page.inner_text(".answer-figures")
    assert "tokens/s" in figures and "TTFT" in figures, figures


def test_stop_frees_the_request(open_page: OpenPage, served: Served) -> None:
    """Red when stopping on the page leaves the engine at work."""
    page = open_page()
    page.fill("#prompt", "Go on and on.")
    page.press("#prompt", "Enter")
    page.locator(".answer").last.wait_for()
    page.press("#prompt", "Escape")
    page.locator("#send", has_text="Send").wait_for(timeout=20_000)
    served.wait_idle()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_inside_under_load(open_page: OpenPage, served: Served, theme: str) -> None:
    """Red when the engine's pictures are not what the page draws, in either theme."""
    page = open_page("/#inside", color_scheme=theme)
    page.locator("#pulse[data-state=open]").wait_for()
    page.fill("#demo-count", "8")
    page.check("#demo-repeat")  # the tiny model is soon done
    page.click("#demo-go")
    page.locator(".lane").nth(3).wait_for()  # a batch, not one after the other
    page.locator(".branch").first.wait_for()
    assert "pages of 16 tokens" in page.inner_text("#pool")
    page.click("#demo-go")  # stop
    wait_until(lambda: page.locator(".lane").count() == 0, 15, "lanes gone")
    assert "hits" in page.inner_text("#tree")  # the shared prefix was found again
    served.wait_idle()


def test_the_server_view(open_page: OpenPage) -> None:
    """Red when models, batches or the cache are not told as the page reads them."""
    page = open_page("/#server")
    page.locator("#server-models .row").first.wait_for()
    assert "Ready" in page.inner_text("#server-models")
    page.locator("#server-cache .standfirst", has_text="Off.").wait_for()
    assert page.is_hidden("#server-failure")
