"""The Inside view: one snapshot in, every picture right; and what happens when the stream fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.page.conftest import Console, OpenPage
from tests.page.fake_engine import FakeEngine
from tests.page.mock_server import MockServer, Reply

if TYPE_CHECKING:
    from playwright.sync_api import Page

# The colour of a pixel inside each square, away from the marks drawn in its middle and corner.
PIXELS = """async (cells) => {
  const { layOut } = await import('/page/pool.js');
  const canvas = document.querySelector('canvas.pool');
  const { size, columns } = layOut(cells.length, canvas.parentElement.clientWidth);
  const pen = canvas.getContext('2d');
  const scale = canvas.width / (columns * size);
  return cells.map((_, i) => {
    const x = ((i % columns) + 0.25) * size * scale;
    const y = (Math.floor(i / columns) + 0.6) * size * scale;
    return [...pen.getImageData(x, y, 1, 1).data].join();
  });
}"""


def still_engine(mock: MockServer) -> FakeEngine:
    engine = FakeEngine()
    engine.advance(200)
    snapshot = engine.snapshot()
    mock.snapshot = lambda: snapshot
    return engine


def watch(open_page: OpenPage, **options: object) -> Page:
    page = open_page("/#inside", **options)
    page.locator("#pulse[data-state=open]").wait_for()
    return page


def test_every_picture_shows_the_snapshot(open_page: OpenPage, mock: MockServer) -> None:
    """Red when a view stops reading its part of the snapshot."""
    engine = still_engine(mock)
    snapshot = engine.snapshot()
    assert len(engine.running) > 3  # else this test shows nothing
    page = watch(open_page)
    assert "512 pages of 16 tokens" in page.inner_text("#pool")
    assert page.locator(".lane").count() == len(engine.running)
    assert page.locator(".branch").count() == len(snapshot["tree"])
    assert f"{snapshot['tree'][0]['hits']} hits" in page.inner_text(".branch >> nth=0")
    assert page.locator(".queue li").count() == len(engine.waiting)
    assert page.locator(".histogram").count() == 2
    assert page.locator(".histogram >> nth=0").locator(".bar").count() == 9
    assert "half within" in page.inner_text(".histogram >> nth=1")
    assert "64% of 1,000 guesses kept" in page.inner_text(".speculation")
    assert "640 steps saved for 1.24 s of guessing" in page.inner_text(".speculation")
    assert f"{len(engine.running)} / 16" in page.inner_text("#figures")
    lane = engine.running[0]
    doing = page.inner_text(".lane >> nth=0")
    assert f"#{lane.id}" in doing
    assert f"+{lane.fed}" in doing
    writers = [i for i, one in enumerate(snapshot["lanes"]) if one["drafted"]]
    assert "· 2/4" in page.inner_text(f".lane >> nth={writers[0]}")


def test_groups_of_layers_are_told(open_page: OpenPage, mock: MockServer) -> None:
    """Red when pages of one group of layers are shown as if they held every layer's tokens."""
    mock.snapshot = FakeEngine(windows=(None, 20, 20)).snapshot
    page = watch(open_page)
    pool = page.inner_text("#pool .standfirst")
    assert "512 pages of 16 tokens" in pool and "16 tokens take 3 pages" in pool
    assert "2 of the groups see the last 20 tokens" in pool
    assert "one in each of 3 groups" in page.inner_text("#tree .standfirst")
    mock.snapshot = FakeEngine(windows=(4096,)).snapshot
    page.wait_for_function(
        "() => document.querySelector('#pool .standfirst').textContent.includes('last 4,096 ')"
    )
    mock.snapshot = FakeEngine().snapshot
    page.wait_for_function(
        "() => document.querySelector('#pool .standfirst').textContent.endsWith('of 16 tokens.')"
    )
    assert "groups" not in page.inner_text("#tree .standfirst")


def test_experts_are_told_where_there_are_any(open_page: OpenPage, mock: MockServer) -> None:
    """Red when the line is missing, or stays when no tokens came or the model has no experts."""
    engine = FakeEngine()
    mock.snapshot = engine.snapshot
    page = watch(open_page)
    assert not page.is_visible(".experts")
    engine.experts = {
        "worst_layer": 7,
        "worst_imbalance": 2.3456,
        "average_imbalance": 1.51,
        "idle": 3,
    }
    page.locator(".experts").wait_for()
    said = page.inner_text(".experts")
    assert "2.3 times its share in layer 7" in said and "1.5 times on average" in said
    assert said.endswith("3 without a token")
    engine.experts = None
    page.locator(".experts").wait_for(state="hidden")


def test_places_outside_the_pool_are_told(open_page: OpenPage, mock: MockServer) -> None:
    """Red when a place is missing, half full looks full, or nothing is shown as something."""
    engine = FakeEngine()
    mock.snapshot = engine.snapshot
    page = watch(open_page)
    assert not page.is_visible("#places")
    engine.places = (
        {"name": "memory", "bytes": 3 << 20, "limit": 4 << 20, "loads": 1},
        {"name": "disk", "bytes": 1 << 30, "limit": 8 << 30, "loads": 40},
        {"name": "engines", "bytes": 0, "limit": 0, "loads": 7},
    )
    page.locator("#places").wait_for()
    rows = [page.inner_text(f".places li >> nth={i}").split("\n") for i in range(3)]
    assert [row[0] for row in rows] == ["Memory", "Disk", "Other engines"]
    assert "3.0 MiB of 4.0 MiB · 1 page came back" in rows[0][-1]
    assert "1.0 GiB of 8.0 GiB · 40 pages came back" in rows[1][-1]
    assert rows[2][-1] == "7 pages came back"
    assert (
        page.locator(".places .position-fill >> nth=0").evaluate("one => one.style.width") == "75%"
    )


def test_adapters_are_named_on_lanes(open_page: OpenPage, mock: MockServer) -> None:
    """Red when a request's adapter is not shown, or requests without one show a label."""
    engine = still_engine(mock)
    picture = engine.snapshot()
    picture["lanes"][1]["adapter"] = "french"
    mock.snapshot = lambda: picture
    page = watch(open_page)
    assert page.inner_text(".lane >> nth=1").split("\n")[1] == "french"
    assert not page.is_visible(".lane >> nth=0 >> .lane-adapter")
    assert "with the adapter french." in (
        page.locator(".lane >> nth=1").get_attribute("data-tip") or ""
    )


def test_colours_follow_owners(open_page: OpenPage, mock: MockServer) -> None:
    """Red when two states look alike, or one request has two colours."""
    engine = still_engine(mock)
    page = watch(open_page)
    cells = engine.cells()
    colours: dict[int, set[str]] = {}
    for owner, colour in zip(cells, page.evaluate(PIXELS, cells), strict=True):
        colours.setdefault(owner, set()).add(colour)
    for owner in {0, -2, *(v.id for v in engine.running if v.pages)}:
        assert len(colours[owner]) == 1, owner
    assert not colours[0] & colours[-2]
    lives = [next(iter(colours[visitor.id])) for visitor in engine.running if visitor.pages]
    assert len(set(lives)) == len(lives)
    assert not set(lives) & (colours[0] | colours[-1] | colours[-2])


def test_pointing_says_whose(open_page: OpenPage, mock: MockServer) -> None:
    """Red when a square does not name its owner, or a lane does not light up its pages."""
    engine = still_engine(mock)
    page = watch(open_page)
    page.hover("canvas.pool", position={"x": 5, "y": 5})
    assert "Page 0: shared by several" in page.inner_text("#pool-says")
    page.mouse.move(2, 2)
    before = page.evaluate(PIXELS, engine.cells())
    page.hover(".lane >> nth=1")
    lit = engine.running[1].id
    after = page.evaluate(PIXELS, engine.cells())
    for owner, old, new in zip(engine.cells(), before, after, strict=True):
        if owner == lit:
            assert old == new
        elif owner > 0:
            assert old != new
    assert f"Request {lit}" in page.inner_text("#tip")


def test_the_grid_by_finger_and_keyboard(open_page: OpenPage, mock: MockServer) -> None:
    """Red when only a mouse can ask whose a page is."""
    still_engine(mock)
    page = watch(open_page, has_touch=True)
    page.tap("canvas.pool", position={"x": 5, "y": 5})
    page.wait_for_timeout(200)
    assert page.inner_text("#pool-says").startswith("Page 0:")
    page.focus("canvas.pool")
    page.keyboard.press("Escape")
    page.focus("canvas.pool")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#pool-says").startswith("Page 1:")


def test_a_dropped_stream_comes_back(
    open_page: OpenPage, mock: MockServer, console: Console
) -> None:
    """Red when one lost connection ends the picture for good."""
    console.expect("404")
    engine = still_engine(mock)
    page = watch(open_page)
    mock.is_inside_down = True
    mock.drop_streams()
    page.locator("#pulse[data-state=lost]").wait_for()
    assert page.locator(".lane").count() == len(engine.running)  # the last picture stays
    mock.is_inside_down = False
    page.locator("#pulse[data-state=open]").wait_for()
    assert mock.num_inside == 2


def test_a_restarting_engine(open_page: OpenPage, mock: MockServer) -> None:
    """Red when a snapshot without most of its keys breaks the view."""
    page = open_page("/#inside")
    page.get_by_text("Engine restarting").wait_for()
    mock.snapshot = lambda: {"ready": True, "t": 1.0}  # ready, but nothing to tell yet
    page.locator("#pulse[data-state=open]").wait_for()
    engine = still_engine(mock)
    page.locator(".lane").first.wait_for()
    assert page.locator(".lane").count() == len(engine.running)


def test_looking_away_closes_the_stream(open_page: OpenPage, mock: MockServer) -> None:
    """Red when a hidden view keeps costing the engine snapshots."""
    still_engine(mock)
    page = watch(open_page)
    mock.disconnected.clear()
    page.click("#tab-chat")
    assert mock.disconnected.wait(3)


def test_histograms_follow_their_counts(open_page: OpenPage, mock: MockServer) -> None:
    """Red when bars keep the scale of the first snapshot and grow out of their frame."""
    snapshot = FakeEngine().snapshot()
    mock.snapshot = lambda: snapshot
    page = watch(open_page)
    heights = """() => [...document.querySelectorAll('.histogram:nth-of-type(2) .bar-fill')]
      .map((bar) => bar.getBoundingClientRect().height / bar.parentElement.clientHeight)"""
    counts = [0, 5000, 0, 0, 2500, 0, 0, 0, 0, 0]
    snapshot["api"]["ttft"] = {**snapshot["api"]["ttft"], "counts": counts}
    page.get_by_text("95% within 228 ms").wait_for()
    page.wait_for_timeout(400)  # bars take a moment to grow
    shown = page.evaluate(heights)
    assert max(shown) == pytest.approx(1, abs=0.02)
    assert sorted(shown)[-2] == pytest.approx(0.5, abs=0.02)


def test_freeze(open_page: OpenPage, mock: MockServer) -> None:
    """Red when freezing does not hold the picture still."""
    engine = FakeEngine()

    def moving() -> dict[str, object]:
        engine.advance()
        return engine.snapshot()

    mock.snapshot = moving
    page = watch(open_page)
    page.click("#freeze")
    held = page.inner_text("#lanes .standfirst")
    page.wait_for_timeout(300)
    assert page.inner_text("#lanes .standfirst") == held
    page.click("#freeze")
    page.wait_for_function(
        "(held) => document.querySelector('#lanes .standfirst').textContent !== held", arg=held
    )


def test_the_largest_grid_is_cheap(open_page: OpenPage, mock: MockServer) -> None:
    """Red when 4096 squares and 200 branches cost more than a fraction of a snapshot's time."""
    engine = FakeEngine(num_pages=4096, pages_per_cell=4)
    engine.advance(300)
    snapshot = engine.snapshot()
    snapshot["tree"] = [{**snapshot["tree"][1], "id": i, "parent": i // 3} for i in range(1, 201)]
    mock.snapshot = lambda: snapshot
    page = watch(open_page)
    assert "16,384 pages" in page.inner_text("#pool")
    took = page.evaluate(
        """async (snapshot) => {
          const { PoolView } = await import('/page/pool.js');
          const { TreeView } = await import('/page/tree.js');
          const { Spotlight } = await import('/page/spotlight.js');
          const root = document.querySelector('#pool').cloneNode();
          document.querySelector('#pool').after(root);
          const views = [new PoolView(root, new Spotlight()), new TreeView(root)];
          for (const view of views) view.update(snapshot);
          const begin = performance.now();
          for (let i = 0; i < 10; i += 1) for (const view of views) view.update(snapshot);
          return (performance.now() - begin) / 10;
        }""",
        snapshot,
    )
    assert took < 60  # ms, of the 100 between snapshots at the highest rate


def test_demo_load(open_page: OpenPage, mock: MockServer) -> None:
    """Red when the load is not concurrent, does not share its prefix, or cannot be stopped."""
    still_engine(mock)
    mock.reply = lambda body: Reply(delay_s=0.05, is_endless=True)
    page = watch(open_page)
    page.locator("#demo-count").fill("14")
    page.click("#demo-go")
    page.get_by_text("0 of 14 answers").wait_for()
    page.wait_for_timeout(500)
    assert sorted(body["n"] for body in mock.bodies) == [
        3,
        3,
        4,
        4,
    ]  # browsers open few connections
    systems = {body["messages"][0]["content"] for body in mock.bodies}
    prompts = {body["messages"][1]["content"] for body in mock.bodies}
    assert len(systems) == 1
    assert len(prompts) == 4
    page.evaluate("() => fetch('/v1/models').then((r) => r.json())")  # one is left for the chat
    mock.disconnected.clear()
    page.click("#demo-go")
    assert mock.disconnected.wait(3)
    page.get_by_role("button", name="Start").wait_for()


def test_demo_load_ends_by_itself_unless_repeated(open_page: OpenPage, mock: MockServer) -> None:
    """Red when a load goes on unasked, or does not go on when asked."""
    still_engine(mock)
    page = watch(open_page)
    page.locator("#demo-count").fill("3")
    page.click("#demo-go")
    page.get_by_text("3 of 3 answers").wait_for()
    page.get_by_role("button", name="Start").wait_for()
    assert len(mock.bodies) == 3
    page.check("#demo-repeat")
    page.click("#demo-go")
    page.wait_for_function(
        "() => parseInt(document.querySelector('#demo-status').textContent) > 9", polling=50
    )
    page.uncheck("#demo-repeat")
    page.get_by_role("button", name="Start").wait_for()


def test_arithmetic(page: Page) -> None:
    """Red when a picture's geometry is wrong: quantiles, parts of a lane, places in the tree."""
    assert page.evaluate("""async () => {
      const { quantile } = await import('/page/latency.js');
      const data = { le: [1, 2, 4], counts: [0, 10, 10, 0] };
      const empty = { le: [1], counts: [0, 0] };
      return [quantile(data, 0.5), quantile(data, 0.75), quantile(empty, 0.5)];
    }""") == [2, 3, None]
    assert page.evaluate("""async () => {
      const { shownRange } = await import('/page/latency.js');
      const zeros = Array(20).fill(0);
      const at = (...places) => zeros.map((_, i) => (places.includes(i) ? 1 : 0));
      return [zeros, at(0), at(5, 15), at(19)].map(shownRange);
    }""") == [[0, 8], [0, 8], [4, 17], [12, 20]]
    assert page.evaluate("""async () => {
      const { partsOf } = await import('/page/lanes.js');
      return partsOf({ prompt: 300, computed: 280, known: 300, fed: 64, cached: 128 });
    }""") == {
        "cached": [0, 128],
        "read": [128, 216],
        "written": [216, 216],
        "fed": [216, 280],
        "guessed": [280, 280],
        "refused": [280, 280],
        "pending": [280, 300],
    }
    guessing = page.evaluate("""async () => {
      const { partsOf } = await import('/page/lanes.js');
      const guesses = { drafted: 5, accepted: 2 };
      return partsOf({ prompt: 100, computed: 120, known: 121, fed: 3, cached: 0, ...guesses });
    }""")
    assert guessing["fed"] == [117, 120] and guessing["guessed"] == [118, 120]
    assert guessing["refused"] == [120, 123]
    assert page.evaluate("""async () => {
      const { isReading } = await import('/page/lanes.js');
      const lane = { kind: 'prefill', prompt: 100, computed: 104, known: 105, fed: 4 };
      const again = { ...lane, known: 180 };
      return [lane, again, { ...lane, computed: 100 }].map(isReading);
    }""") == [False, True, True]  # guesses being checked; words computed again; a last chunk
    placed = page.evaluate("""async () => {
      const { placeNodes } = await import('/page/tree.js');
      const node = (id, parent, tokens) => ({ id, parent, tokens });
      const nodes = [node(1, 0, 32), node(2, 1, 16), node(3, 0, 8), node(4, 1, 16), node(9, 77, 4)];
      return placeNodes(nodes).map(({ id, start, depth, up }) => [id, start, depth, up]);
    }""")
    assert placed == [[1, 0, 0, 0], [2, 32, 1, 1], [4, 32, 1, 2], [3, 0, 0, 0], [9, 0, 0, 0]]
