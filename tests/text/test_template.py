"""Chat templates render as Hugging Face's own renderer does, and say why when they cannot."""

from __future__ import annotations

import time
from typing import Any

import pytest

from quire.errors import BadRequest, CheckpointError
from quire.text.template import ChatTemplate

TALK = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": 'Say "<b>é</b>" & more'},
    {"role": "assistant", "content": "<think>hm</think>\nno"},
    {"role": "user", "content": "why?"},
]
CALL = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"function": {"name": "w", "arguments": {"city": "Zürich", "n": [1, None]}}}
        ],
    },
    {"role": "tool", "content": "rain"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "w", "description": "<weather>", "parameters": {"type": "object"}},
    }
]

# The idioms of published templates, one or two each.
TEMPLATES = {
    "chatml": """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "system in first turn": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{% set system_message = messages[0]['content'] | trim %}{% set loop_messages = messages[1:] %}
{% else %}{% set loop_messages = messages %}{% endif %}
{% for m in loop_messages %}{% if loop.first and system_message is defined %}
{{ '[' ~ system_message ~ ']' }}{% endif %}
{{ m.role.upper() }}: {{ m.content.strip() }}{{ eos_token if m.role == 'assistant' }}
{% endfor %}""",
    "tools": """{%- if tools is not none and tools | length > 0 %}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' if not loop.last }}{% endfor %}
{{ tools | tojson(indent=2) }}{% endif %}
{%- for m in messages %}{% if m.tool_calls %}{% for call in m.tool_calls %}
{{- call.function.name }}({%- for k, v in call.function.arguments.items() %}
{{- k }}={{ v | tojson }}{{ ', ' if not loop.last else '' }}{% endfor %})
{%- endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}""",
    "namespace and last user": """{% set ns = namespace(last=-1, seen=[]) %}
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}
{% set ns.seen = ns.seen + [m.content] %}{% endif %}{% endfor %}
{{ ns.last }} {{ ns.seen | join('|') }} {{ messages[::-1] | map(attribute='role') | list }}
{% for m in messages %}{% if loop.index0 > ns.last %}{% break %}{% endif %}
{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}
{% else %}{% continue %}{% endif %}{% endfor %}""",
    "macro and generation": """{% macro turn(m, close=true) %}<{{ m.role }}>{{ caller() if caller }}
{{- m.content }}{% if close %}</{{ m.role }}>{% endif %}{% endmacro %}
{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ turn(m) }}
{% endgeneration %}{% else %}{{ turn(m, close=false) }}{% endif %}{% endfor %}
{% call turn(messages[0]) %}inner{% endcall %}""",
    "filters": """{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ messages | map(attribute='content') | map('upper') | join(' / ') }}
{{ 'a-b'.replace('-', '+') | title }} {{ '%s:%02d' | format('x', 3) }} {{ 'x%s' % 1 }}
{{ '{} {b}'.format(1, b=2) }} {{ 3.14159 | round(2) }} {{ [3, 1, 2] | sort | first }}
{{ {'b': 1, 'a': 2} | dictsort }} {{ 'l1\\nl2' | indent(2) }} {{ none }} {{ true }}
{{ missing is defined }} {{ missing | default('d') }} {{ 7 // 2 ** 1 }} {{ -7 % 3 }}
{{ ('<i>' | safe) ~ '<b>' }} {{ 'abc'[1:] }} {{ [[1, 2], [3]] | sum(start=[]) if false }}""",
}


def oracle(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    rendered, _ = utils.render_jinja_template([messages], chat_template=source, **variables)
    return rendered[0]


@pytest.mark.parametrize("messages", [TALK, CALL], ids=["talk", "call"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_hugging_face_does(name: str, messages: list[dict[str, Any]]) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    for tools in (None, TOOLS):
        for prompt in (True, False):
            got = ChatTemplate(TEMPLATES[name], tokens).render(
                messages, tools=tools, add_generation_prompt=prompt
            )
            want = oracle(
                TEMPLATES[name], messages, tools=tools, add_generation_prompt=prompt, **tokens
            )
            assert got == want


def render(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    return ChatTemplate(source).render(messages or TALK, variables=variables)


def test_variables_reach_the_template() -> None:
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"


def test_date() -> None:
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_a_template_that_says_no_gives_its_reason() -> None:
    with pytest.raises(BadRequest, match="rejects these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("source", ["{{ x.y }}", "{{ 1 / 0 }}", "{{ messages[9].role.x }}"])
def test_a_template_that_fails_is_a_bad_request(source: str) -> None:
    with pytest.raises(BadRequest, match=r"cannot render these messages: .*Error"):
        render(source)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{", "{% for x %}", "{{ x | nosuchfilter }}", "{% endgeneration %}"]
)
def test_a_template_that_does_not_compile(source: str) -> None:
    with pytest.raises(CheckpointError, match="does not compile, line 1"):
        ChatTemplate(source)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "_x", "a-b"])
def test_reserved_variables(name: str) -> None:
    with pytest.raises(BadRequest, match="reserved"):
        ChatTemplate("").render(TALK, variables={name: 1})


def test_variables_must_be_data() -> None:
    with pytest.raises(BadRequest, match="want JSON data"):
        render("", x=print)


def test_keys_named_like_dict_methods_are_still_keys() -> None:
    messages = [{"role": "user", "content": "x", "copy": "c", "update": "u"}]
    assert render("{{ messages[0].copy }}{{ messages[0].update }}", messages) == "cu"


def test_text_that_looks_like_a_template_is_text() -> None:
    messages = [{"role": "user", "content": "{{ 7 * 7 }}{% for %}"}]
    assert render("{{ messages[0].content }}", messages) == "{{ 7 * 7 }}{% for %}"


def test_long_conversations_fit_the_budget() -> None:
    many = [{"role": "user", "content": "word " * 4}] * 5000
    long = [{"role": "user", "content": "word " * 200_000}] * 4
    source = """{% for m in messages %}{% if loop.index0 < messages | length %}
{{ m.content.strip().split('x')[-1] }}{% endif %}{% endfor %}"""
    assert len(render(source, many)) == 5000 * 19
    assert len(render(source, long)) > 3_900_000
