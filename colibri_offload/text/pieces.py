"""From a token's spelling to the bytes it stands for.

The vocabulary spells bytes in one of two ways: byte-level BPE maps every byte to a printable character (GPT-2), and
SentencePiece writes a space as "▁" and a byte that no piece covers as "<0xE4>". Working in bytes, not in strings, is
what lets a stream cut tokens anywhere and characters nowhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from colibri_offload.errors import TextError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte. Printable Latin-1 stands for itself, the other 68 bytes are moved to U+0100 and up.

    Source: Radford et al. 2019, GPT-2 `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(moved)}


BYTE_OF_CHARACTER: Mapping[str, int] = _byte_level_alphabet()


@dataclass(frozen=True)
class PieceRule:
    """How a tokenizer.json decoder turns token spellings into text.

    `replacements` are (spelling, text) pairs. `strip_start` takes one space off the front of a whole text, which undoes
    the "▁" that SentencePiece puts there.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip_start: bool = False

    @classmethod
    def from_decoder(cls, decoder: Any) -> PieceRule:
        """The rule of a `tokenizers` decoder. TextError when it is neither byte-level nor SentencePiece-like."""
        if decoder is None:
            raise TextError(
                "tokenizer.json: decoder is missing, so tokens cannot be turned into text; use another tokenizer.json"
            )
        # The pickle state of every `tokenizers` component is its JSON.
        return cls._from_steps(_flatten(json.loads(decoder.__getstate__())))

    @classmethod
    def _from_steps(cls, steps: Iterable[Mapping[str, Any]]) -> PieceRule:
        byte_level = byte_fallback = False
        replacements: list[tuple[str, str]] = []
        strip_start = False
        for step in steps:
            match step:
                case {"type": "ByteLevel"}:
                    byte_level = True
                case {"type": "ByteFallback"}:
                    byte_fallback = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    replacements.append((old, new))
                case {"type": "Metaspace", "replacement": str(mark)}:
                    replacements.append((mark, " "))
                    strip_start = step.get("prepend_scheme") != "never"
                case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                    strip_start = bool(start)
                case _:
                    raise TextError(
                        f"tokenizer.json: decoder step {step.get('type')!r} is not supported "
                        "(ByteLevel, Metaspace, ByteFallback, Fuse, Replace and Strip are); use another tokenizer.json"
                    )
        return cls(byte_level, byte_fallback, tuple(replacements), strip_start)

    def to_bytes(self, token: str) -> bytes:
        """The bytes that a token's spelling stands for; not always whole characters."""
        if self.byte_level:
            # An added token may contain characters outside the alphabet ("<｜User｜>"): then it is plain text.
            raw = [BYTE_OF_CHARACTER.get(c) for c in token]
            return token.encode() if None in raw else bytes(b for b in raw if b is not None)
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()

    def strip(self, text: str) -> str:
        """`text`, decoded from its very first token, without the spaces that encoding had put in front."""
        return text.removeprefix(" ") if self.strip_start else text


def _flatten(step: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if step.get("type") != "Sequence":
        return [step]
    return [inner for outer in step["decoders"] for inner in _flatten(outer)]
