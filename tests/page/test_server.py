"""The Server view and the model picker: what is shown of models, batches and cached answers."""

from __future__ import annotations

import time

import pytest

from tests.page.conftest import Console, OpenPage
from tests.page.mock_server import Json, MockServer, Reply

MODELS: list[Json] = [
    {"id": "tiny", "state": "ready", "memory": 734_003_200, "max_model_len": 8192, "root": "tiny"},
    {"id": "coder", "state": "parked", "memory": 262_144_000, "root": "coder"},
    {"id": "reader", "state": "loading", "reason": "waits for memory", "root": "reader"},
    {"id": "lost", "state": "failed", "reason": "no config.json in /models/lost", "root": "lost"},
    {"id": "sql", "root": "/adapters/sql", "parent": "tiny"},
    {"id": "auto", "state": "ready", "root": None},
]


def batch(id: str, status: str, done: int, failed: int, total: int) -> Json:
    counts = {"completed": done, "failed": failed, "total": total}
    stamp = int(time.time()) - 400
    return {
        "id": id,
        "status": status,
        "endpoint": "/v1/chat/completions",
        "created_at": stamp,
        "request_counts": counts,
        "errors": None,
    }


@pytest.fixture
def full(mock: MockServer) -> MockServer:
    mock.models = [dict(model) for model in MODELS]
    mock.batches = [
        batch("batch_a1b2c3d4e5f6a7b8c9d0e1f2", "in_progress", 412, 8, 1000),
        batch("batch_00112233445566778899aabb", "completed", 50, 0, 50),
        batch("batch_ffeeddccbbaa998877665544", "cancelled", 3, 0, 10),
    ]
    now = int(time.time())
    entry = {"text": "What is the capital of France? " * 6, "hits": 7, "tokens": 12}
    mock.cache = {
        "mode": "draft",
        "entries": 1234,
        "hits": 56,
        "bytes": 3 << 20,
        "oldest_at": now - 7300,
        "max_entries": 4096,
        "max_age_s": 30 * 86_400,
        "data": [entry | {"created_at": now - 90, "used_at": now}],
    }
    return mock


def test_the_picker_tells_states(open_page: OpenPage, full: MockServer) -> None:
    """Red when a model that is not ready looks like one that is."""
    page = open_page()
    page.locator("#model option").nth(5).wait_for(state="attached")
    labels = page.locator("#model option").all_inner_texts()
    assert labels[:4] == ["tiny", "coder (parked)", "reader (loading)", "lost (failed)"]
    for name, state in (("tiny", "ready"), ("lost", "failed"), ("coder", "parked")):
        page.select_option("#model", name)
        assert page.get_attribute("#model-state", "data-state") == state
    page.select_option("#model", "lost")
    assert "no config.json" in (page.get_attribute("#model", "data-tip") or "")


def test_models_are_acted_on(open_page: OpenPage, full: MockServer, console: Console) -> None:
    """Red when a button does another thing than it says, or a refusal is not told."""
    page = open_page("/#server")
    page.locator("#server-models .row").nth(5).wait_for()
    assert page.locator("#server-models .row-verbs").all_inner_texts()[3:] == ["load", "", ""]
    page.click("[aria-label='park tiny']")
    page.wait_for_timeout(100)
    assert full.acts == [("POST", "/admin/models/park", {"model": "tiny"})]
    full.models[0]["state"] = "parked"
    page.locator("[aria-label='load tiny']").wait_for()
    full.refusal = "this needs an admin key (--admin-api-key)"
    console.expect("403")
    page.click("[aria-label='load tiny']")
    page.locator("#server-failure", has_text="admin key").wait_for()


def test_batches_show_how_far_they_are(open_page: OpenPage, full: MockServer) -> None:
    """Red when progress is not the batch's, or one that has ended can be cancelled."""
    page = open_page("/#server")
    first = page.locator("#server-batches .row").first
    first.wait_for()
    assert "in progress · 412 of 1,000 · 8 failed" in first.inner_text()
    assert first.locator("[role=progressbar]").get_attribute("aria-valuenow") == "42"
    assert page.locator("#server-batches button:visible").count() == 1
    page.click("text=cancel")
    page.wait_for_timeout(100)
    assert full.acts == [("POST", f"/v1/batches/{full.batches[0]['id']}/cancel", {})]
    full.batches[0]["request_counts"]["completed"] = 992
    first.locator("[aria-valuenow='100']").wait_for()


def test_the_cache_is_shown_and_forgotten(open_page: OpenPage, full: MockServer) -> None:
    """Red when a figure is not the cache's, or one click forgets everything."""
    page = open_page("/#server")
    leaf = page.locator("#server-cache")
    leaf.locator(".row").wait_for()
    text = leaf.inner_text()
    for part in ("draft", "1,234", "3.0 MiB", "2 hours", "7 hits · 12 tokens · 1 minute old"):
        assert part in text, part
    page.click("text=Forget all")
    assert full.acts == []
    page.click("text=Forget them")
    page.wait_for_timeout(100)
    assert full.acts == [("DELETE", "/v1/answer_cache", {})]
    full.cache = {"mode": "off", "entries": 0, "data": []}
    leaf.get_by_text("Off.").wait_for()


def test_an_answer_tells_who_gave_it(open_page: OpenPage, full: MockServer) -> None:
    """Red when the choice of "auto" is not shown with its reason."""
    full.reply = lambda body: Reply(route="coder; reason=escalated; mean_logprob=-1.31<-1.00")
    page = open_page()
    page.locator("#model option").nth(5).wait_for(state="attached")
    page.select_option("#model", "auto")
    page.fill("#prompt", "Hard?")
    page.press("#prompt", "Enter")
    page.hover(".answer-figures >> text=by coder")
    assert "escalated" in page.inner_text("#tip")
    assert full.bodies[0]["model"] == "auto"
