"""Running the command line in tests: inside the process, or as the real program."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest

from colibri_offload.cli.main import main

PROGRAM = [sys.executable, "-m", "colibri_offload.cli"]
BUDGET = ["--memory-budget", "4GiB"]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of stderr that says what was wrong."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert self.err.splitlines()[-1] == lines[0], self.err
        assert "Traceback" not in self.err
        return lines[0]


class Cli:
    """cli("run", "-m", …) calls main() in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Result:
        self._capsys.readouterr()
        code = main([str(a) for a in arguments])
        captured = self._capsys.readouterr()
        return Result(code, captured.out, captured.err)


def program(*arguments: object, stdin: bytes = b"", timeout: float = 60, **options) -> Result:
    """The real program."""
    done = subprocess.run(
        [*PROGRAM, *map(str, arguments)], input=stdin, capture_output=True, timeout=timeout, **options
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())
