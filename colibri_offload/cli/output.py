"""What people see: text on stdout, everything else on stderr; plain where nobody looks at a terminal."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_NUMBER = re.compile(r"[0-9.,]+%?( (B|[KMGT]iB|s))?")


def one_line(text: object) -> str:
    return " ".join(str(text).splitlines())


def note(text: str) -> None:
    """A line on stderr."""
    print(one_line(text), file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON object on one line of stdout."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False))


def table(rows: Iterable[Sequence[object]], indent: str = "") -> str:
    """Rows in aligned columns, numbers to the right; no lines around them, so that they can be cut and searched."""
    columns = list(zip(*([str(cell) for cell in row] for row in rows), strict=True))
    aligned = []
    for column in columns:
        width = max(map(len, column))
        numbers = all(_NUMBER.fullmatch(cell) for cell in column)
        aligned.append([cell.rjust(width) if numbers else cell.ljust(width) for cell in column])
    return "\n".join((indent + "  ".join(row)).rstrip() for row in zip(*aligned, strict=True))


class Meter:
    """A progress bar on stderr, or nothing when that is no terminal. Call it with (what, done bytes, total bytes)."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn(),
            console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}
        self.done = self.total = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        self.done, self.total = done, total
        if what not in self._tasks:
            for task in self._tasks.values():
                self._bar.update(task, visible=False)
            self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._tasks[what], completed=done, total=total)

    def __enter__(self) -> Meter:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
