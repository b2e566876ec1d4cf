from __future__ import annotations

from itertools import count

import pytest

from twostroke.errors import InvalidRequest, ModelError
from twostroke.text.meter import TemplateLimits
from twostroke.text.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]


def render(source: str, *, limits: TemplateLimits | None = None) -> str:
    return "".join(segment.text for segment in ChatTemplate(source, control_names=(), limits=limits).render(MESSAGES))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ namespace.__init__.__globals__.keys() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ strftime_now.__closure__[0].cell_contents }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ '%s' | attr('__class__') }}{{ ('' | attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}{{ '{0.__class__.__mro__}'.format('').x }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'x' * 10**9 }}",
        "{{ 1000000000 * ['x'] }}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x={}) %}{% for i in range(60) %}{% set n.x = {1: n.x, 2: n.x} %}{% endfor %}",
        "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ (1).to_bytes(1000000000) }}",
        "{{ ('a' * 10000).replace('a', 'b' * 10000) }}",
        "{{ ('a' * 10000) | replace('a', 'b' * 10000) }}",
        "{{ range(99999) | map('string') | join('x' * 10000) }}",
        "{{ ('x' * 10000).join(range(99999) | map('string') | list) }}",
        "{{ ('x\n' * 10000) | indent('y' * 10000) }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        "{{ ([[1] * 999] * 9) | sum(start=[]) }}",
    ],
)
def test_a_template_cannot_run_away(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source, limits=TemplateLimits(steps=20_000, size=1 << 18))
    assert caught.value.field == "messages"


def test_a_slow_template_ends_at_its_time_limit() -> None:
    ticks = count()
    slow = ChatTemplate(
        "{% for i in range(100) %}{% endfor %}",
        control_names=(),
        limits=TemplateLimits(seconds=50),
        clock=lambda: float(next(ticks)),  # each look at the clock takes a second
    )
    with pytest.raises(InvalidRequest, match="too long"):
        slow.render(MESSAGES)


def test_a_loop_of_literal_text_counts_as_text() -> None:
    with pytest.raises(InvalidRequest, match="too much text"):
        render("{% for i in range(5000) %}" + "x" * 1_000 + "{% endfor %}", limits=TemplateLimits(size=1 << 20))


@pytest.mark.parametrize("source", ["{{ 'x' | center(9) }}", "{{ 1 | nothing }}", "x" * (1 << 20), "{{ " + "(" * 5_000])
def test_a_template_that_cannot_be_let_in_is_the_models_error(source: str) -> None:
    with pytest.raises(ModelError):
        render(source)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        (
            "{% for i in [1, 2, 3] if i != 2 %}{{ loop.index }}/{{ loop.length }}{{ ' ' if loop.first }}{% endfor %}",
            "1/2 2/2",
        ),
        ("{% generation %}hi{% endgeneration %}", "hi"),
        ("{{ {'a': '<b>é'} | tojson }}", '{"a": "<b>é"}'),
        ("{{ [1, {'k': none}] | tojson(indent=1) }}", '[\n 1,\n {\n  "k": null\n }\n]'),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
        ("{% set a, b = (1, 2) %}{{ a ~ b }}", "12"),
        (
            "{% set n = namespace(found=false) %}{% for i in [1] %}{% set n.found = true %}{% endfor %}{{ n.found }}",
            "True",
        ),
        ("{% for key, value in {'a': 1}.items() %}{{ key }}={{ value }}{% endfor %}", "a=1"),
        ("{% macro m(x, y=2) %}{{ x }}{{ y }}{{ caller() }}{% endmacro %}{% call m(1) %}!{% endcall %}", "12!"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}", "hi"),
        ("{{ 'a-b'.split('-') | last }}{{ '%s:%d' | format('x', 3) }}{{ 'a\nb' | indent(2) }}", "bx:3a\n  b"),
        ("{{ messages[-1:][0].content if messages[0]['role'] in ('user', 'tool') else '' }}", "hi"),
        (
            "{{ dict(a=1).a }}{{ [3, 1, 2] | sort | first }}{{ [1, 2] | sum }}{{ missing is defined }}{{ missing }}",
            "113False",
        ),
    ],
)
def test_what_chat_templates_use_works_as_in_transformers(source: str, text: str) -> None:
    assert render(source) == text
