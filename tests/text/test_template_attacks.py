"""Hostile chat templates: each must be refused, quickly, and without using much memory."""

from __future__ import annotations

import sys
import threading
import time
import tracemalloc

import pytest

from quire.errors import BadRequest, CheckpointError, QuireError
from quire.text.meter import LimitReached, Meter
from quire.text.template import ChatTemplate

HI = [{"role": "user", "content": "Hi"}]


def doubling(build: str, start: str = "'a'", then: str = "") -> str:
    begin = f"{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}"
    return f"{begin}{build}{{% endfor %}}{then}"


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ messages[0].__class__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ loop._iterable }}{% for x in [1] %}{{ loop._iterable }}{% endfor %}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '%s'.__mod__ }}",
    "{{ ''.format_map({}) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ dict.update(messages[0], {}) }}",
    "{{ (1).to_bytes(9) }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages | map('attr', '__class__') | list }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ lipsum.__globals__ }}",
    "{{ '%s' % namespace(a=1) }}",
]

BOMBS = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(9999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) if false %}{% endfor %}" * 2000,
    "{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "{% set y %}{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}{% endset %}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "{{ 'a' * 10**9 }}",
    "{{ 'a' * 1000000000 }}",
    "{{ 1000000000 * 'a' }}",
    "{{ [0] * 1000000000 }}",
    "{{ [0] | list * 100000000 }}",
    "{{ 9 ** 999999999 }}",
    "{{ ((9 ** 99) ** 99) ** 99 }}",
    doubling("{% set ns.x = ns.x * ns.x %}", "9 ** 99"),
    doubling("{% set ns.x = ns.x + ns.x %}"),
    doubling("{% set ns.x = ns.x ~ ns.x %}"),
    doubling("{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
    doubling("{% set ns.x = '{0}{0}'.format(ns.x) %}"),
    doubling("{% set ns.x = [ns.x, ns.x] | join %}"),
    doubling("{% set ns.x = ns.x.replace('a', 'aa') %}"),
    doubling("{% set ns.x = ns.x.join([ns.x, ns.x]) %}"),
    doubling("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    doubling("{% set ns.x = ns.x + ns.x %}", "[1]"),
    doubling("{% set ns.x = [ns.x, ns.x] %}", "[1]", "{{ ns.x }}"),
    doubling("{% set ns.x = [ns.x, ns.x] %}", "[1]", "{{ ns.x == [ns.x] }}"),
    doubling("{% set ns.x = (ns.x, ns.x) %}", "(1,)", "{{ {ns.x: 1} }}"),
    doubling("{% set ns.x = {'a': ns.x, 'b': ns.x} %}", "{}", "{{ ns.x | tojson }}"),
    doubling("{% set ns.x = dict(a=ns.x, b=ns.x) %}", "{}", "{{ ns.x | string }}"),
    doubling("{% set ns.x = [ns.x, ns.x] | list %}", "[1]", "{{ ns.x | tojson }}"),
    "{{ '%1000000000s' % 'a' }}",
    "{{ '%(a)1000000000s' % {'a': 1} }}",
    "{{ '%((a))1000000000s' % {'(a)': 1} }}",
    "{{ '%.1000000000f' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000s' | format('a') }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ ('%(a)s' * 100000) % {'a': 'x' * 100000} }}",
    "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ 'a'.zfill(1000000000) }}",
    "{{ 'a\t'.expandtabs(1000000000) }}",
    "{{ 'a' | indent(1000000000, true) }}",
    "{{ 1.5 | round(1000000000, 'ceil') }}",
    "{{ [1] | batch(1000000000, 0) | list }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{{ ('a' * 1000000).replace('', 'b' * 1000000) }}",
    "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "{{ ('a' * 1000000).join(['b'] * 100000) }}",
    "{{ ['b'] * 100000 | join('a' * 1000000) }}",
    "{{ ('a' * 4000000).strip('b' * 2000000 ~ 'a') }}",
    "{% set b = ['a' * 100] * 9999 %}{% for i in range(99999) %}{{ b == [b] + b }}{% endfor %}",
    "{{ 'x' * 4000000 }}" * 100,
    "{{ messages | tojson }}" * 4000 + "{{ 'a' * 10**9 }}",
]

MALFORMED = [
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "-" * 20_000 + "1 }}",
    "{% if 1 %}" * 1000 + "{% endif %}" * 1000,
    "{% for i in [1] %}" * 50 + "{% endfor %}" * 50,
    "x" * 200_000,
    "{% break %}",
    "{{ 1" + "0" * 5000 + " }}",
]


def attack(source: str) -> str:
    return ChatTemplate(source).render(HI)


@pytest.mark.parametrize("source", ESCAPES)
def test_escapes_are_refused(source: str) -> None:
    with pytest.raises(QuireError):
        attack(source)


@pytest.mark.parametrize("source", BOMBS, ids=lambda s: s[:60])
def test_bombs_are_refused_in_time(source: str) -> None:
    begin = time.thread_time()
    with pytest.raises((CheckpointError, BadRequest)):
        attack(source)
    assert time.thread_time() - begin < 6.0


@pytest.mark.parametrize("source", MALFORMED, ids=lambda s: s[:30])
def test_malformed_templates_are_refused(source: str) -> None:
    with pytest.raises(CheckpointError):
        attack(source)


def test_bombs_use_little_memory() -> None:
    tracemalloc.start()
    try:
        for source in BOMBS:
            if "range(9" not in source and "macro" not in source and len(source) < 2000:
                with pytest.raises(QuireError):
                    attack(source)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 300_000_000


def test_messages_are_not_changed_by_rendering() -> None:
    messages = [{"role": "user", "content": "Hi", "list": [1]}]
    with pytest.raises(QuireError):
        ChatTemplate("{{ messages[0].list.append(2) }}").render(messages)
    assert messages == [{"role": "user", "content": "Hi", "list": [1]}]


def test_renders_in_threads_do_not_share_a_budget() -> None:
    template = ChatTemplate("{% for i in range(5000) %}{{ i }}{% endfor %}")
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda: results.append(template.render(HI))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["".join(map(str, range(5000)))] * 8


def test_meter_weighs_shared_parts_as_if_printed() -> None:
    meter = Meter()
    x: list[object] = ["a"]
    for _ in range(10):
        x = [x, x]
    assert meter.weigh(x) > 2**10
    with pytest.raises(LimitReached):
        for _ in range(60):
            x = [x, x]
            meter.hold(x)


def test_text_modules_do_not_import_torch() -> None:
    import subprocess

    code = (
        "import sys; import quire.text.tokenizer, quire.text.detokenize, quire.text.stops; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
