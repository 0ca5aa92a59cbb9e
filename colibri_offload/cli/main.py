"""The entry point: arguments in, exit code out. Every failure is one line on stderr.

Exit codes: 0 done, 1 the run failed, 2 the command line cannot be used, 130 interrupted, 141 nobody reads the output.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

import typer

from colibri_offload.cli.app import DEBUG, app
from colibri_offload.cli.output import note
from colibri_offload.errors import ColibriError, UsageError

_GLOBAL_FLAGS = ("--debug", "--version", "--help", "-h")
# typer brings its own click since 0.2x, so the base of its errors is reached through one that it exports
_ClickUsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    _survive_odd_terminals()
    try:
        code = _run(_with_command(sys.argv[1:] if arguments is None else list(arguments)))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        note("interrupted")
        return 130
    except BrokenPipeError:
        _forget_stdout()
        return 141
    except ColibriError as error:
        _trace()
        note(f"error: {error}")
        return 2 if isinstance(error, UsageError) else 1
    except MemoryError:
        _trace()
        note("error: no memory is left: close other programs, or give a smaller --memory-budget or --ctx")
        return 1
    except OSError as error:
        _trace()
        _forget_stdout()
        note(f"error: {error}: check the file and its disk")
        return 1
    except Exception as error:
        _trace()
        hint = "" if _debugging() else "; --debug shows where"
        note(f"error: {type(error).__name__}: {error}: this is a bug, please report it{hint}")
        return 1


def _run(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context("colibri", arguments) as context:
            command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    except _ClickUsageError as error:
        raise UsageError(f"{error.format_message()} (colibri COMMAND --help lists what there is)") from error  # type: ignore[attr-defined]
    return 0


def _with_command(arguments: list[str]) -> list[str]:
    """`colibri -m … -p …` is short for `colibri run -m … -p …`; `colibri` alone asks for help."""
    first = next((i for i, a in enumerate(arguments) if a not in _GLOBAL_FLAGS), None)
    if first is None:
        return arguments or ["--help"]
    return [*arguments[:first], "run", *arguments[first:]] if arguments[first].startswith("-") else arguments


def _debugging() -> bool:
    return os.environ.get(DEBUG, "") not in ("", "0")


def _trace() -> None:
    if _debugging():
        traceback.print_exc()


def _survive_odd_terminals() -> None:
    """A character that the terminal's encoding lacks is shown as its escape instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _forget_stdout() -> None:
    """Keep the interpreter from flushing into the broken pipe again when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
