"""Chat templates: Jinja in a sandbox, with the helpers that Hugging Face's `apply_chat_template` offers.

Source: https://huggingface.co/docs/transformers/chat_templating_writing (trimmed blocks, loop controls,
`raise_exception`, `strftime_now`, `tojson` without HTML escapes, the `generation` block). Undefined variables print as
nothing, as there.

A template comes with a model file, so it is untrusted: it can neither reach Python's internals nor change what it is
given, and the text that it makes is bounded. (It may still loop for long; time is the caller's to bound.)
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from colibri_offload.errors import TextError

MAX_CHARACTERS = 16 * 1024 * 1024  # about 4 M tokens, more than any context


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; for rendering it is a plain block."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a bound on the values that operators can build."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and _sized(left) and _sized(right):
            _check_size(len(left) + len(right))
        elif operator == "*" and _sized(left) != _sized(right):
            _check_size(len(left) * right if _sized(left) else len(right) * left)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * right)
        return super().call_binop(context, operator, left, right)


def _sized(value: Any) -> bool:
    return isinstance(value, str | list | tuple)


def _check_size(size: Any) -> None:
    if size > MAX_CHARACTERS:
        raise jinja2.TemplateError(f"builds a value of more than {MAX_CHARACTERS} characters")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().strftime(fmt)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str) -> None:
        """Raises TextError with the line when `source` is not valid Jinja."""
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise TextError(f"chat template, line {e.lineno}: {_one_line(e)}; pass --raw to do without it") from e
        except RecursionError as e:
            raise TextError("chat template: nested too deeply; pass --raw to do without it") from e

    def render(self, **variables: Any) -> str:
        """The prompt text. Raises TextError with the template's own message."""
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(**variables):
                size += len(piece)
                _check_size(size)
                pieces.append(piece)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as e:
            raise TextError(
                f"chat template: {_one_line(e)}; change the messages, or pass --raw to do without it"
            ) from e
        return "".join(pieces)


def _one_line(e: BaseException) -> str:
    return " ".join(str(e).split()) or type(e).__name__
