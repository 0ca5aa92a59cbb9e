"""Where a prompt comes from: the flag, a file, or stdin."""

from __future__ import annotations

import sys
from pathlib import Path

from colibri_offload.errors import UsageError


def read_prompt(text: str | None, file: Path | None) -> str:
    """The prompt, without the last line end of a file or stdin. Raises UsageError for none, two or an empty one."""
    if (text is None) == (file is None):
        given = "both are given" if text is not None else "none is given"
        raise UsageError(f"the prompt: give either -p TEXT (-p - for stdin) or --prompt-file FILE; {given}")
    if file is not None:
        prompt = _decoded(_bytes(file), f"--prompt-file {file}")
    else:
        prompt = _decoded(sys.stdin.buffer.read(), "-p -: stdin") if text == "-" else str(text)
    if not prompt:
        raise UsageError("the prompt is empty: give at least one character")
    return prompt


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"--prompt-file {file}: cannot be read ({error.strerror}); check the path") from error


def _decoded(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what}: byte {error.start} is not UTF-8; save the text as UTF-8") from error
