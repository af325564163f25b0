"""Conversations with tools reach templates in the shape they are written for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.errors import BadRequest
from quire.text.template import ChatTemplate
from quire.text.tools.definitions import check_tools
from quire.text.tools.formats import detect_tool_format, tool_parser
from quire.text.tools.prompt import spell_out_tools, template_messages, tools_as_system_text
from tests.text.tool_reading import read

TOOLS = check_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Look <outside>.",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        }
    ]
)
DEFINITIONS = [tool.definition() for tool in TOOLS]
ARGUMENTS = {"city": "Zürich"}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief.", "name": None},
    {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {
                "id": "abc123def",
                "type": "function",
                "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abc123def", "content": "yes"},
    {"role": "assistant", "content": "It rains.", "tool_calls": []},
    {"role": "user", "content": "And tomorrow?"},
]


def one(**fields: Any) -> dict[str, Any]:
    return template_messages([{"role": "user", "content": "x", **fields}])[0]


def test_messages_take_the_shape_of_templates() -> None:
    shaped = template_messages(CONVERSATION)
    assert [m["role"] for m in shaped] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert shaped[0] == {"role": "system", "content": "Be brief."}
    assert shaped[1]["content"] == "Rain?"
    call = {
        "id": "abc123def",
        "type": "function",
        "function": {"name": "weather", "arguments": ARGUMENTS},
    }
    assert shaped[2] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert shaped[3] == {"role": "tool", "content": "yes", "tool_call_id": "abc123def"}
    assert shaped[4] == {"role": "assistant", "content": "It rains."}


def test_parts_are_joined_and_names_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert one(content=parts, name="ada") == {"role": "user", "content": "a\nb", "name": "ada"}
    assert one(role="function", name="f")["role"] == "tool"
    assert one(role="assistant", reasoning="hm")["reasoning_content"] == "hm"


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": NaN}', '"x"'])
def test_arguments_that_are_no_object_stay_text(text: str) -> None:
    calls = [{"function": {"name": "f", "arguments": text}}]
    shaped = one(role="assistant", tool_calls=calls)
    assert shaped["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.parametrize("nothing", [None, "", " "])
def test_no_arguments_are_an_empty_object(nothing: str | None) -> None:
    shaped = one(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": nothing}}])
    assert shaped["tool_calls"][0]["function"]["arguments"] == {}


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}


@pytest.mark.parametrize(
    ("messages", "param", "reason"),
    [
        ([], "messages", "got 0 messages"),
        ("hi", "messages", "want a list"),
        ([{"role": "user", "content": "x"}] * 2001, "messages", "2001 messages, want 1 to 2000"),
        (["hi"], "messages[0]", "want an object"),
        ([{"content": "x"}], "messages[0].role", "want one of system, developer"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role", "'wizard', want one of"),
        ([{"role": "user"}], "messages[0].content", "of type NoneType, want a string"),
        ([{"role": "tool", "content": {}}], "messages[0].content", "of type dict"),
        ([{"role": "user", "content": [IMAGE]}], "messages[0].content[0]", "no images"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}],
            "messages[0].content[1]",
            "type='input_audio'",
        ),
        ([{"role": "user", "content": [{"type": "file"}]}], "messages[0].content[0]", "files"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x", "image_url": "data:"}]}],
            "messages[0].content[0]",
            "'image_url'",
        ),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "want {"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "want"),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name", "want a string"),
        (
            [{"role": "assistant", "tool_calls": "f"}],
            "messages[0].tool_calls",
            "want a list of calls",
        ),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]", "want {"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}],
            "messages[0].tool_calls[0].function.name",
            "want a string",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}],
            "messages[0].tool_calls[0].function.arguments",
            "want the JSON text",
        ),
        ([{"role": "user", "content": "\ud800"}], "messages", "not valid text"),
    ],
)
def test_bad_messages_are_refused_by_name(messages: Any, param: str, reason: str) -> None:
    with pytest.raises(BadRequest) as caught:
        template_messages(messages)
    assert reason in str(caught.value)
    assert caught.value.param == param


# ------------------------------------------------------------ templates

# What the templates of these families do with tools, calls and results, in their own idioms.
TEMPLATES = {
    "hermes": """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{%- for tool in tools %}{{- tool | tojson }}{% endfor %}
{{- '\\nreturn <tool_call>\\n{"name": <n>, "arguments": <a>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant' }}
{%- for tool_call in message.tool_calls %}{%- set tool_call = tool_call.function %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}""",
    "llama3_json": """{{- bos_token }}{%- if not tools is defined %}{%- set tools = none %}
{%- endif %}
{%- if tools is not none %}{{- 'Environment: ipython\\n<|python_tag|>' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{% endfor %}{% endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '[' + message['role'] + ']' + message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}{{- raise_exception('one call at once') }}{% endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}
{{- '}<|eot_id|>' }}
{%- else %}{{- '[ipython]' }}
{%- if message.content is mapping or message.content is iterable %}
{{- message.content | tojson }}{%- else %}{{- message.content }}{% endif %}{{- '<|eot_id|>' }}
{%- endif %}{% endfor %}""",
    "mistral": """{%- if messages[0]['role'] == 'system' %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{% endif %}
{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in loop_messages %}{%- if message['role'] == 'user' %}
{%- if tools is not none and message == user_messages[-1] %}{{- '[AVAILABLE_TOOLS][' }}
{%- for tool in tools %}{%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
{%- for key, val in tool.items() if key != 'return' %}
{%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
{%- else %}{{- '"' + key + '": ' + val | tojson }}{% endif %}
{%- if not loop.last %}{{- ', ' }}{% endif %}{% endfor %}{{- '}}' }}{% endfor %}
{{- '][/AVAILABLE_TOOLS]' }}{% endif %}{{- '[INST]' + message['content'] + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- '[TOOL_CALLS][' }}{%- for tool_call in message.tool_calls %}
{%- set out = tool_call.function | tojson %}{{- out[:-1] }}
{%- if not tool_call.id is defined or tool_call.id | length != 9 %}
{{- raise_exception('ids have 9 characters') }}{% endif %}
{{- ', "id": "' + tool_call.id + '"}' }}{% endfor %}{{- ']' + eos_token }}
{%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}
{%- elif message['role'] == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' + message.content | string + ', "call_id": "' }}
{{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}{% endif %}{% endfor %}""",
}
CALLS_IN_PROMPT = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Zürich"}}<|eot_id|>',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Zürich"}, "id"',
}
RESULTS_IN_PROMPT = {
    "hermes": "<tool_response>\nyes\n</tool_response>",
    "llama3_json": '[ipython]"yes"<|eot_id|>',
    "mistral": '[TOOL_RESULTS]{"content": yes, "call_id": "abc123def"}[/TOOL_RESULTS]',
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_print_tools_calls_and_results(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    prompt = template.render(template_messages(CONVERSATION), tools=DEFINITIONS)
    assert '"name": "weather"' in prompt and "Look <outside>." in prompt
    assert CALLS_IN_PROMPT[name] in prompt
    assert RESULTS_IN_PROMPT[name] in prompt
    assert prompt.count("It rains.") == 1 and "And tomorrow?" in prompt
    assert detect_tool_format(TEMPLATES[name]) == name


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_template_prints_the_parser_reads(name: str) -> None:
    """The template's own spelling of a call is what the model was trained to write."""
    template = ChatTemplate(TEMPLATES[name], {"bos_token": "", "eos_token": ""})
    call = template_messages(CONVERSATION)[2:3]
    user: list[Any] = template_messages([{"role": "user", "content": "Q"}])
    before = template.render(user, add_generation_prompt=False)
    printed = template.render([*user, *call], add_generation_prompt=False)[len(before) :]
    printed = printed.removeprefix("<|im_start|>assistant").rstrip("\n")
    printed = printed.removesuffix("<|im_end|>").removesuffix("<|eot_id|>")
    assert read(tool_parser(name), [printed]).plain() == ("", [("weather", ARGUMENTS)])


CHATML = """{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content + '\\n' }}{% endfor %}"""


def test_a_template_without_tools_gets_them_as_text() -> None:
    assert detect_tool_format(CHATML) is None
    prompt = ChatTemplate(CHATML).render(spell_out_tools(template_messages(CONVERSATION), TOOLS))
    system, rest = prompt.split("<|user|>", 1)
    assert system.startswith("<|system|>Be brief.\n\n")
    assert json.dumps(DEFINITIONS[0]) in system and "<tool_call>" in system
    assert f"<|assistant|>{CALLS_IN_PROMPT['hermes']}\n<|user|><tool_response>\nyes\n" in rest
    calls = read(tool_parser("hermes"), [rest]).calls
    assert [call.name for call in calls] == ["weather"]


def test_results_share_a_turn_and_the_system_text_comes_first() -> None:
    messages = template_messages(
        [
            {"role": "user", "content": "Q"},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
        ]
    )
    spelled = spell_out_tools(messages, TOOLS)
    assert [m["role"] for m in spelled] == ["system", "user", "user"]
    assert spelled[0]["content"] == tools_as_system_text(TOOLS)
    assert str(spelled[2]["content"]).count("<tool_response>") == 2
    assert spell_out_tools(messages[:1], []) == messages[:1]
