"""Templates behave as under Hugging Face, and stay in their sandbox."""

from datetime import datetime

import pytest

from colibri_offload.errors import TextError
from colibri_offload.text import template as module
from colibri_offload.text.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if true %}\n  x\n{% endif %}\ny", "  x\ny"),  # trim_blocks
        ("   {% if true %}x{% endif %}", "x"),  # lstrip_blocks
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(4) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "013"),
        ("{{ {'a': '<b>&\\'ü'} | tojson }}", '{"a": "<b>&\'ü"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", '{\n "b": 1,\n "a": 2\n}'),
        ("{{ 'ü' | tojson(ensure_ascii=true) }}", '"\\u00fc"'),
        ("[{{ nothing }}][{{ nothing is defined }}]", "[][False]"),
        ("{{ messages[0].nothing }}{{ messages[0].role }}", "user"),
        ("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c", "abhic"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ 'ab' * 2 + 'c' }}{{ 2 ** 10 }}{{ [1] + [2] }}", "ababc1024[1, 2]"),
        ("{{ '<>' }}", "<>"),
    ],
)
def test_renders_as_hugging_face_does(source, expected):
    assert ChatTemplate(source).render(messages=MESSAGES) == expected


def test_strftime_now():
    before = datetime.now().strftime("%Y")
    assert ChatTemplate("{{ strftime_now('%Y') }}").render() in (before, datetime.now().strftime("%Y"))


def test_raise_exception_reaches_the_user():
    with pytest.raises(TextError, match=r"chat template: Roles must alternate; change the messages, or pass --raw"):
        ChatTemplate("{{ raise_exception('Roles must\n alternate') }}").render()


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% endfor %}", "{% include 'x' ", "{% unknown %}"])
def test_syntax_errors_name_the_line(source):
    with pytest.raises(TextError, match=r"chat template, line 2: .*--raw") as e:
        ChatTemplate("ok\n" + source)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "source", ["{{ 1 + 'a' }}", "{{ nothing.x }}", "{{ 1 // 0 }}", "{{ [1][5].x }}", "{{ nothing | tojson }}"]
)
def test_run_time_errors(source):
    with pytest.raises(TextError, match="chat template: ") as e:
        ChatTemplate(source).render()
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ (messages | attr('__class__')).x }}",
        "{{ messages[0].__class__.__init__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'changed'}) }}",
        "{{ messages[0].clear() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
        "{{ range(10000000) | list }}",
    ],
)
def test_cannot_leave_the_sandbox(source):
    messages = [dict(m) for m in MESSAGES]
    try:
        text = ChatTemplate(source).render(messages=messages)
    except TextError:
        text = ""
    assert "class" not in text and "root" not in text and "uid" not in text
    assert messages == MESSAGES


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 1000000000000 }}",
        "{{ 1000000000000 * 'a' }}",
        "{{ [0] * 1000000000000 }}",
        "{{ 10 ** 1000000000 }}",
        "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    ],
)
def test_values_are_bounded(source):
    with pytest.raises(TextError, match="more than"):
        ChatTemplate(source).render()


def test_output_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_CHARACTERS", 1000)
    looping = ChatTemplate("{% for i in range(99999) %}0123456789{% endfor %}")
    with pytest.raises(TextError, match="more than 1000 characters"):
        looping.render()
