"""A headless Chromium and the mock server; without either the tests say so and are skipped.

Every page is watched: an error on its console, which is also where a breach of the
Content-Security-Policy shows, fails the test unless the test said it expects that one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.page.mock_server import MockServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")  # while it is open, its driver's event loop counts as running
def browser() -> Iterator[Browser]:
    driver = pytest.importorskip("playwright.sync_api", reason="the playwright package is absent")
    path = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def mock() -> Iterator[MockServer]:
    server = MockServer()
    yield server
    server.close()


@dataclass
class Console:
    errors: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    def expect(self, part: str) -> None:
        """Errors that contain `part` belong to the test."""
        self.expected.append(part)

    def hear(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def surprises(self) -> list[str]:
        return [e for e in self.errors if not any(part in e for part in self.expected)]


@pytest.fixture
def console() -> Console:
    return Console()


OpenPage = Callable[..., "Page"]


@contextmanager
def opener(browser: Browser, mock: MockServer, console: Console) -> Iterator[OpenPage]:
    contexts = []

    def open_(at: str = "/", **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(8000)
        page.on("console", console.hear)
        page.on("pageerror", lambda error: console.errors.append(str(error)))
        page.goto(mock.url + at)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert console.surprises() == []


@pytest.fixture
def open_page(browser: Browser, mock: MockServer, console: Console) -> Iterator[OpenPage]:
    """Opens the page; keywords are those of a browser context (viewport, color_scheme, ...)."""
    with opener(browser, mock, console) as open_:
        yield open_


@pytest.fixture
def page(open_page: OpenPage) -> Page:
    return open_page()


@pytest.fixture(scope="module")
def still_page(browser: Browser) -> Iterator[Page]:
    """One page for all tests of a module that only call its functions."""
    server = MockServer()
    with opener(browser, server, Console()) as open_:
        yield open_()
    server.close()
