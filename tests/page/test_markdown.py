"""Markdown as the page renders it: what models write, and what attackers make them write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

# Renders text once in full; returns the markup for comparison. Reading innerHTML is harmless.
RENDER = """async (text) => {
  const { Prose } = await import('/page/prose.js');
  const prose = new Prose();
  prose.update(text);
  return prose.element.innerHTML;
}"""

# Feeds the same text in small pieces, as streaming does.
STREAM = """async ([text, size]) => {
  const { Prose } = await import('/page/prose.js');
  const prose = new Prose();
  for (let end = size; end < text.length + size; end += size) prose.update(text.slice(0, end));
  for (const code of prose.element.querySelectorAll('code')) code.normalize();
  return prose.element.innerHTML;
}"""

SAMPLE = """# Title with `code`

A paragraph with **bold**, *italic*, ***both*** and ~~gone~~ text, snake_case_name, 2 * 3 * 4.
Second line, a [link](https://example.org/a_(b)) and https://example.org/x.

1. one
2. two
   - inner *a*
   - inner b

     ```sh
     echo nested
     ```
3. three

~~~python
def f(x):
    return `x` < 3 & "<b>"
~~~

| a | b |
|---|--:|
| 1 | **2** |

> quoted
> - list in quote

---

The end \\*not italic\\*.
"""


def render(page: Page, text: str) -> str:
    html: str = page.evaluate(RENDER, text)
    return html


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a **b** *c* ~~d~~", "<p>a <strong>b</strong> <em>c</em> <s>d</s></p>"),
        ("***x***", "<p><strong><em>x</em></strong></p>"),
        ("*a **b***", "<p><em>a <strong>b</strong></em></p>"),
        ("snake_case_name", "<p>snake_case_name</p>"),
        ("2 * 3 * 4", "<p>2 * 3 * 4</p>"),
        ("``a`b``", "<p><code>a`b</code></p>"),
        ("`a``b` `` ` ``", "<p><code>a``b</code> <code>`</code></p>"),
        ("open `code", "<p>open `code</p>"),
        ("a\nb", "<p>a<br>b</p>"),
        ("3. x\n4. y", '<ol start="3"><li>x</li><li>y</li></ol>'),
        ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
        ("## H ##", '<h4 class="md-heading">H</h4>'),
        ("a &amp; <b>", "<p>a &amp;amp; &lt;b&gt;</p>"),
        ("---", "<hr>"),
    ],
)
def test_renders(still_page: Page, text: str, html: str) -> None:
    """Red when a construct models use daily comes out differently."""
    assert render(still_page, text) == html


def test_open_fence_is_code(still_page: Page) -> None:
    """Red when a code block streams as prose until its end arrives."""
    html = render(still_page, "Look:\n```python\nif a < b:\n    **x**")
    assert "<code>if a &lt; b:\n    **x**</code>" in html
    assert "<strong>" not in html


@pytest.mark.parametrize("size", [1, 3, 17])
def test_streaming_ends_where_rendering_at_once_does(still_page: Page, size: int) -> None:
    """Red when what is shown depends on how the text was cut into pieces."""
    assert still_page.evaluate(STREAM, [SAMPLE, size]) == render(still_page, SAMPLE)


def test_finished_blocks_are_left_alone(still_page: Page) -> None:
    """Red when a token at the end makes the page rebuild the beginning."""
    kept = still_page.evaluate("""async () => {
      const { Prose } = await import('/page/prose.js');
      const prose = new Prose();
      prose.update('first\\n\\n```\\ncode');
      const [first, code] = prose.element.children;
      prose.update('first\\n\\n```\\ncode goes on\\n```\\n\\nlast');
      return [first === prose.element.children[0], code === prose.element.children[1]];
    }""")
    assert kept == [True, True]


ATTACKS = [
    "<img src=x onerror=\"document.title='owned'\">",
    "<script>document.title='owned'</script>",
    "[x](javascript:document.title='owned')",
    "[x](JaVaScRiPt:document.title='owned')",
    "[x](java\tscript:document.title='owned')",
    "[x]( javascript:document.title='owned')",
    "[x](data:text/html,<script>parent.document.title='owned'</script>)",
    "[x](vbscript:x)",
    "[x](file:///etc/passwd)",
    "[x](/v1/models)",
    "![x](https://example.org/track.png)",
    "<https://example.org/\" onmouseover=\"document.title='owned'>",
    "```html onload=x\n<script>document.title='owned'</script>\n```",
    '```"><img src=x onerror=alert(1)>\nx\n```',
    "| <img src=x onerror=alert(1)> |\n|---|\n| <svg onload=alert(1)> |",
    "# <iframe srcdoc='<script>parent.document.title=1</script>'>",
    "[<img src=x onerror=alert(1)>](https://example.org)",
    '[a](https://example.org/"onclick="alert(1))',
]

INSPECT = """async (text) => {
  const { Prose } = await import('/page/prose.js');
  const prose = new Prose();
  prose.update(text);
  document.body.append(prose.element);
  const all = [...prose.element.querySelectorAll('*')];
  await new Promise((done) => setTimeout(done, 30));
  return {
    tags: all.map((e) => e.localName),
    handlers: all.flatMap((e) => e.getAttributeNames()).filter((n) => /^on|style|srcdoc/.test(n)),
    links: all.filter((e) => e.localName === 'a').map((e) => [e.protocol, e.rel, e.target]),
    title: document.title,
  };
}"""


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_text_stays_text(still_page: Page, attack: str) -> None:
    """Red when model text gains a tag, a handler or a scheme it should not have."""
    found: dict[str, Any] = still_page.evaluate(INSPECT, attack)
    banned = {"img", "script", "iframe", "svg", "style", "object", "form", "input"}
    assert not banned & set(found["tags"])
    assert found["handlers"] == []
    assert found["title"] == "Quire"
    for protocol, rel, target in found["links"]:
        assert protocol in ("http:", "https:", "mailto:")
        assert "noopener" in rel
        assert target == "_blank"


def test_cost_does_not_grow_with_the_answer(still_page: Page) -> None:
    """Red when each piece makes the page read or build the whole answer again."""
    took = still_page.evaluate("""async () => {
      const { Prose } = await import('/page/prose.js');
      const prose = new Prose();
      const begin = performance.now();
      let text = '';
      for (let i = 0; i < 2000; i += 1) {
        text += `Sentence ${i} of a **long** answer.\\n\\n`;
        prose.update(text);
      }
      return [performance.now() - begin, prose.element.childElementCount];
    }""")
    assert took[0] < 5000  # ms; building everything anew each time takes several times that
    assert took[1] == 2000


HOSTILE = ["*a ", "**a", "_a ", "[", "[a](", "`", "`` ` ", "> ", "- ", "|a", "~~x ", "http://", "<"]


@pytest.mark.parametrize("piece", HOSTILE)
def test_no_text_takes_long(still_page: Page, piece: str) -> None:
    """Red when some repetition makes the renderer quadratic (or recurse without end)."""
    took = still_page.evaluate(
        """async (text) => {
          const { Prose } = await import('/page/prose.js');
          const begin = performance.now();
          new Prose().update(text);
          return performance.now() - begin;
        }""",
        piece * 20_000,
    )
    assert took < 3000
