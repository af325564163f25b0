"""The Compare view: two settings, two streams, one table."""

from __future__ import annotations

from tests.page.conftest import OpenPage
from tests.page.fake_engine import FakeEngine
from tests.page.mock_server import MockServer, Reply


def test_two_settings_side_by_side(open_page: OpenPage, mock: MockServer) -> None:
    """Red when the two requests differ in more or less than their settings."""
    mock.reply = lambda body: Reply(pieces=("Same start", f" but {body['temperature']}."))
    page = open_page("/#compare")
    page.fill("#compare-prompt", "Which?")
    page.fill("#compare-A-temperature", "0.2")
    page.fill("#compare-B-temperature", "0.9")
    page.fill("#compare-B-seed", "")
    page.click("text=Run both")
    page.locator(".verdict table").wait_for()
    answers = page.locator(".side-answer").all_inner_texts()
    assert "but 0.2" in answers[0]
    assert "but 0.9" in answers[1]
    assert "agree for 3 words" in page.inner_text(".verdict")
    assert "Time to first token" in page.inner_text(".verdict")
    first, second = sorted(mock.bodies, key=lambda body: body["temperature"])
    assert {**first, "temperature": 0.9} == second


def test_both_run_at_once_or_in_turn(open_page: OpenPage, mock: MockServer) -> None:
    """Red when "one after the other" sends two, or both at once sends one."""
    mock.reply = lambda body: Reply(delay_s=0.05, is_endless=True)
    page = open_page("/#compare")
    page.click("text=Run both")
    page.wait_for_timeout(500)
    assert len(mock.bodies) == 2
    page.keyboard.press("Escape")
    assert mock.disconnected.wait(3)
    page.check("#compare-turn")
    page.click("text=Run both")
    page.wait_for_timeout(500)
    assert len(mock.bodies) == 3
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Run both").wait_for()
    assert len(mock.bodies) == 3


def test_speculation_is_offered_where_there_is_some(open_page: OpenPage, mock: MockServer) -> None:
    """Red when the switch shows without speculation, or does not reach the request."""
    engine = FakeEngine(has_speculation=False)
    mock.snapshot = engine.snapshot
    page = open_page("/#compare")
    page.wait_for_timeout(400)
    assert not page.is_visible("#compare-B-speculation")
    engine.has_speculation = True
    page.click("#tab-chat")
    page.click("#tab-compare")
    page.locator("#compare-B-speculation").wait_for()
    page.uncheck("#compare-B-speculation")
    page.click("text=Run both")
    page.locator(".verdict table").wait_for()
    assert sorted(body.get("speculation", True) for body in mock.bodies) == [False, True]
