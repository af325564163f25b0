"""Outputs as models write them, for each format; the cuts between pieces never matter."""

from __future__ import annotations

import re
from typing import Any

import pytest

from quire.errors import NotSupported
from quire.text.tools.formats import detect_tool_format, needs_special_tokens, tool_parser
from quire.text.tools.parser import CallStart
from quire.text.tools.writer import MAX_CALLS
from tests.text.tool_reading import FORMATS, chunkings, cut, read

PARIS = ("weather", {"city": "Paris"})
CLOCK = ("clock", {})
PARIS_CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
CLOCK_CALL = '{"name": "clock", "arguments": {}}'

CASES: list[tuple[str, str, str, list[Any]]] = [
    # ------------------------------------------------------------ hermes
    ("hermes", "Hello <b>you</b>", "Hello <b>you</b>", []),
    ("hermes", f"<tool_call>\n{PARIS_CALL}\n</tool_call>", "", [PARIS]),
    ("hermes", f"Sure.\n<tool_call>\n{PARIS_CALL}\n</tool_call>", "Sure.\n", [PARIS]),
    (
        "hermes",
        f"<tool_call>\n{PARIS_CALL}\n</tool_call>\n<tool_call>\n{CLOCK_CALL}\n</tool_call>\n",
        "",
        [PARIS, CLOCK],
    ),
    ("hermes", f"\n\n<tool_call>{CLOCK_CALL}</tool_call> done", " done", [CLOCK]),
    ("hermes", f"<tool_call>[{PARIS_CALL}, {CLOCK_CALL}]</tool_call>", "", [PARIS, CLOCK]),
    ("hermes", f"<tool_call>{PARIS_CALL}\n{CLOCK_CALL}</tool_call>", "", [PARIS, CLOCK]),
    ("hermes", f"<tool_call>{CLOCK_CALL}<tool_call>{PARIS_CALL}", "", [CLOCK, PARIS]),
    ("hermes", f"<tool_call>{CLOCK_CALL}", "", [CLOCK]),
    ("hermes", f"<tool_call>{CLOCK_CALL}</tool_", "", [CLOCK]),
    ("hermes", f"<tool_call>{CLOCK_CALL[:-1]}", "", [CLOCK]),
    ("hermes", '<tool_call>{"name": "clock"}</tool_call>', "", [CLOCK]),
    ("hermes", '<tool_call>{"name": "clock", "arguments": null}</tool_call>', "", [CLOCK]),
    (
        "hermes",
        '<tool_call>{"id": 7, "arguments": {"city": "Paris"}, "name": "weather"}</tool_call>',
        "",
        [PARIS],
    ),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        "",
        [PARIS],
    ),
    (
        "hermes",
        '<tool_call>{"name": "run", "arguments": {"code": "if a:\n\tb(\\"\\d\\")"}}</tool_call>',
        "",
        [("run", {"code": 'if a:\n\tb("\\d")'})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "say", "arguments": {"x": "</tool_call>", "y": [1, -2.5e3]}}'
        "</tool_call>",
        "",
        [("say", {"x": "</tool_call>", "y": [1, -2500.0]})],
    ),
    ("hermes", f"<tool_call>{CLOCK_CALL}}}</tool_call>", "}</tool_call>", [CLOCK]),
    # ------------------------------------------------------------ llama3_json
    ("llama3_json", "It is sunny.", "It is sunny.", []),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama3_json", '<|python_tag|>{"name": "clock", "parameters": {}}', "", [CLOCK]),
    (
        "llama3_json",
        'On it.<|python_tag|>{"name": "clock", "parameters": {}}',
        "On it.",
        [CLOCK],
    ),
    (
        "llama3_json",
        '{"name": "clock", "parameters": {}}; {"name": "weather", "parameters": {"city": "Paris"}}',
        "",
        [CLOCK, PARIS],
    ),
    (
        "llama3_json",
        ' {"type": "function", "name": "clock", "parameters": {}}\n' + PARIS_CALL + "\n",
        "",
        [CLOCK, PARIS],
    ),
    ("llama3_json", '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    ("llama3_json", '{"answer": [1, 2]} is it', '{"answer": [1, 2]} is it', []),
    ("llama3_json", "[1, 2, 3]", "[1, 2, 3]", []),
    (
        "llama3_json",
        '<|python_tag|>brave_search.call(query="x")',
        '<|python_tag|>brave_search.call(query="x")',
        [],
    ),
    # ------------------------------------------------------------ mistral
    ("mistral", "See [1] and [TOOL].", "See [1] and [TOOL].", []),
    ("mistral", f"[TOOL_CALLS][{PARIS_CALL}]", "", [PARIS]),
    ("mistral", f"[TOOL_CALLS] [{PARIS_CALL}, {CLOCK_CALL}]", "", [PARIS, CLOCK]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "clock", "arguments": {}, "id": "abcdefghi"}]',
        "",
        [CLOCK],
    ),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}', "", [PARIS]),
    (
        "mistral",
        'Hm.[TOOL_CALLS]clock{}[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}',
        "Hm.",
        [CLOCK, PARIS],
    ),
    ("mistral", "[TOOL_CALLS]clock[ARGS]{} then", " then", [CLOCK]),
    # ------------------------------------------------------------ pythonic
    ("pythonic", "[1] as I said", "[1] as I said", []),
    ("pythonic", '[weather(city="Paris"), clock()]', "", [PARIS, CLOCK]),
    ("pythonic", "<|python_start|>[clock()]<|python_end|>", "", [CLOCK]),
    (
        "pythonic",
        "[f(a=1, b=-2.5, c=True, d=None, e=[1, 'x', (2,)], g={'k': \"v)]\\n\\u00e9\"},)]",
        "",
        [
            (
                "f",
                {"a": 1, "b": -2.5, "c": True, "d": None, "e": [1, "x", [2]], "g": {"k": "v)]\né"}},
            )
        ],
    ),
    ("pythonic", "[math.add(a=1)]", "", [("math.add", {"a": 1})]),
    # ------------------------------------------------------------ forced
    ("forced", '[{"name": "weather", "parameters": {"city": "Paris"}}]', "", [PARIS]),
    ("forced", f"[{PARIS_CALL},\n {CLOCK_CALL}]\n", "", [PARIS, CLOCK]),
    ("forced", "I would rather not.", "I would rather not.", []),
]


@pytest.mark.parametrize(("name", "output", "text", "calls"), CASES)
def test_outputs_as_models_write_them(
    name: str, output: str, text: str, calls: list[tuple[str, Any]]
) -> None:
    for pieces in chunkings(output):
        reading = read(FORMATS[name](), pieces)
        assert reading.plain() == (text, calls), pieces
        assert all(call.closing is None for call in reading.calls)


MALFORMED = [
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>\n"),
    ("hermes", "<tool_cal"),
    ("hermes", "</tool_call>"),
    ("hermes", "<tool_call></tool_call>"),
    ("hermes", "<tool_call>weather in Paris</tool_call>"),
    ("hermes", '<tool_call>{"name": "weather"'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "two words", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "Paris"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1'),
    ("hermes", '<tool_call>{name: "f", arguments: {}}</tool_call>'),
    ("hermes", "<tool_call>[]</tool_call>"),
    ("hermes", "<tool_call>[7]</tool_call>"),
    ("hermes", '<tool_call>{"arguments": {"a": ' + "[" * 80 + "]" * 80 + "}}</tool_call>"),
    ("hermes", '<tool_call>{"arguments": {"a": ' + "1" * 200 + "}}</tool_call>"),
    ("hermes", "<function=f><parameter=a>1</parameter></function>"),
    ("llama3_json", "{"),
    ("llama3_json", '{"name": "f"}'),
    ("llama3_json", '{"name": "f", "parameters": 3}'),
    ("llama3_json", "<|python_tag|>"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS]two words{}"),
    ("mistral", "[TOOL_CALLS]f[ARGS]"),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]a b[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]" + "f" * 300 + "{}"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=b)]"),
    ("pythonic", "[f(a=g())]"),
    ("pythonic", "[f(a=1, a=2)]"),
    ("pythonic", "[f(a=1]"),
    ("pythonic", "[f(a=1)"),
    ("pythonic", "[f(a='x)]"),
    ("pythonic", "[f(a=1e999)]"),
    ("pythonic", "[f(a='\\ud800')]"),
    ("pythonic", "[f(a=1) g()]"),
    ("pythonic", "[f(a=٣)]"),
    ("pythonic", "[f(a=" + "[" * 80 + "]" * 80 + ")]"),
    ("pythonic", "[__import__('os').system('id')]"),
    ("forced", '{"name": 3}'),
    ("forced", '[{"name": "f", "parameters": tru}]'),
    ("forced", ""),
    ("forced", " \n."),
]


@pytest.mark.parametrize(("name", "output"), MALFORMED)
def test_what_is_not_a_call_is_text(name: str, output: str) -> None:
    for pieces in chunkings(output):
        reading = read(FORMATS[name](), pieces)
        assert (reading.text, reading.calls) == (output, []), pieces


# (after the head, arguments as streamed, closing, text after)
CUT = [
    ('{"a": "Par', '{"a": "Par', '"}', ""),
    ('{"a": [1, 2', '{"a": [1', "]}", ""),
    ('{"a": 12', '{"a": ', "null}", ""),
    ('{"a"', '{"a"', ": null}", ""),
    ('{"a": "x\\', '{"a": "x', '"}', ""),
    ("{", "{", "}", ""),
    # Broken JSON: closed where it was sound, the rest is text.
    ('{"a": oops}}', '{"a": null}', "", "oops}}"),
    ('{"a": 1, b}}', '{"a": 1}', "", ", b}}"),
    ('{"a": [tru]}}', '{"a": []}', "", "tru]}}"),
    ('{"a": 1]}', '{"a": 1}', "", "]}"),
]
HEADS = [
    ("hermes", '<tool_call>{"name": "f", "arguments": '),
    ("llama3_json", '{"name": "f", "parameters": '),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": '),
    ("mistral", "[TOOL_CALLS]f[ARGS]"),
    ("forced", '[{"name": "f", "parameters": '),
]


@pytest.mark.parametrize(("name", "head"), HEADS)
@pytest.mark.parametrize(("output", "arguments", "closing", "text"), CUT)
def test_arguments_that_stop_early_say_so(
    name: str, head: str, output: str, arguments: str, closing: str, text: str
) -> None:
    for pieces in chunkings(head + output):
        reading = read(FORMATS[name](), pieces)
        assert reading.text == text
        (call,) = reading.calls
        assert (call.name, call.arguments, call.closing) == ("f", arguments, closing)


def test_arguments_flow_before_the_call_is_complete() -> None:
    parser = tool_parser("hermes")
    start, arguments = parser.push('<tool_call>{"name": "f", "arguments": {"code": "print(1')
    assert isinstance(start, CallStart) and start.name == "f"
    assert getattr(arguments, "delta", None) == '{"code": "print(1'


def test_text_flows_unless_it_may_begin_a_marker() -> None:
    parser = tool_parser("hermes")
    assert [getattr(part, "text", None) for part in parser.push("a < b <tool")] == ["a < b "]
    assert [getattr(part, "text", None) for part in parser.push("box>")] == ["<toolbox>"]


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("hermes", f"<tool_call>{CLOCK_CALL}</tool_call>"),
        ("llama3_json", f"{CLOCK_CALL};"),
        ("mistral", "[TOOL_CALLS]clock[ARGS]{}"),
    ],
)
def test_calls_are_bounded(name: str, unit: str) -> None:
    for size in (7, 10**6):
        reading = read(tool_parser(name), cut(unit * (MAX_CALLS + 3), size))
        assert len(reading.calls) == MAX_CALLS
        assert reading.text.lstrip(";") == unit * 3
    too_long = f"[{'clock(),' * (MAX_CALLS + 1)}]"
    assert read(tool_parser("pythonic"), [too_long]).plain() == (too_long, [])


def test_ids_suit_the_model() -> None:
    (hermes, _) = tool_parser("hermes").push(f"<tool_call>{CLOCK_CALL}")
    (mistral, _) = tool_parser("mistral").push("[TOOL_CALLS]clock[ARGS]{}")
    assert isinstance(hermes, CallStart) and re.fullmatch("call_[0-9a-f]{24}", hermes.id)
    assert isinstance(mistral, CallStart) and re.fullmatch("[A-Za-z0-9]{9}", mistral.id)


# ------------------------------------------------------------ names and detection

HERMES_TEMPLATE = (
    '{% if tools %}<tool_call>{"name": <name>, "arguments": <args>}</tool_call>{% endif %}'
)


@pytest.mark.parametrize(
    ("template", "vocab", "name"),
    [
        (None, ["<tool_call>"], None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ["<|python_tag|>"], None),
        (HERMES_TEMPLATE, [], "hermes"),
        (HERMES_TEMPLATE, ["<|python_tag|>"], "hermes"),  # Hermes 3 on Llama 3.1
        (HERMES_TEMPLATE.replace('"', '\\"'), [], "hermes"),
        ("{% if tools %}<tool_call>\n<function=f>{% endif %}", [], None),  # Qwen 3 Coder
        ("{% if tools %}<tool_call>f<arg_key>a</arg_key>{% endif %}", [], None),  # GLM 4.5
        ("{{ tools | tojson }}{{ '[TOOL_CALLS]' }}", [], "mistral"),
        ("{{ tools | tojson }}{{ '<|python_tag|>' }}", [], "llama3_json"),
        ('{{ tools }}Respond with {"name": n, "parameters": p}', ["<|python_tag|>"], "llama3_json"),
        ('{{ tools }}Respond with {"name": n, "parameters": p}', [], None),
        ("{{ tools }}Environment: ipython {{ '\"parameters\": ' }}", [], "llama3_json"),
        ("{{ tools }}[func_name1(params_name1=params_value1)]", [], "pythonic"),
        ("{{ tools }}<tool>", [], None),
    ],
)
def test_format_of_a_template(template: str | None, vocab: list[str], name: str | None) -> None:
    assert detect_tool_format(template, vocab) == name


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(NotSupported, match=r"unknown tool call parser 'hermez'; did you mean"):
        tool_parser("hermez")


def test_markers_that_are_special_tokens() -> None:
    assert needs_special_tokens("mistral") and not needs_special_tokens("hermes")
