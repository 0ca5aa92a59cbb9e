"""Keep special-token strings inside chat messages from becoming control tokens.

Once a template has pasted a message between its own markers, "<|im_end|>" typed by a user looks like the marker. So
before rendering every such string in a message is broken up by a mark that no text contains; after the tokenizer has
split off the real markers, and before it splits words, the mark is removed again (see `Tokenizer.encode_chat`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# Templates look for these in the assistant's own turns, to drop old reasoning: broken up they would not be found.
REASONING_TAGS = frozenset({"<think>", "</think>"})
# Unicode noncharacters: never assigned, not meant for interchange (The Unicode Standard, section 23.7).
MARKS = tuple(chr(c) for c in range(0xFDD0, 0xFDF0))


class Neutraliser:
    """Breaks up the strings in `special`. Strings of one character cannot be broken up and stay as they are."""

    def __init__(self, special: Iterable[str]) -> None:
        strings = {s for s in special if len(s) > 1}
        self._any = _pattern(strings)
        self._assistant = _pattern(strings - REASONING_TAGS)

    def mark_for(self, value: Any) -> str | None:
        """A mark that `value` does not contain, or None when there is nothing in `value` to break up."""
        strings = list(_strings(value))
        if not any(self._any.search(s) for s in strings):
            return None
        return next((m for m in MARKS if not any(m in s for s in strings)), MARKS[0])

    def apply(self, value: Any, mark: str) -> Any:
        """A copy of `value` (lists, dicts, strings) in which the mark follows every character of a special string."""
        return _map(value, self._any, self._assistant, mark)


def _pattern(strings: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(strings, key=lambda s: (-len(s), s))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)", re.DOTALL)


def _map(value: Any, pattern: re.Pattern[str], assistant: re.Pattern[str], mark: str) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda m: "".join(c + mark for c in m[0]), value)
    if isinstance(value, Mapping):
        inner = assistant if value.get("role") == "assistant" else pattern
        return {_map(k, inner, assistant, mark): _map(v, inner, assistant, mark) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_map(v, pattern, assistant, mark) for v in value]
    return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from _strings(k)
            yield from _strings(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _strings(v)
