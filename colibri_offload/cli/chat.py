"""colibri chat: a conversation on the terminal, or line by line through a pipe."""

from __future__ import annotations

import sys
from contextlib import closing, suppress

from colibri_offload.cli.flags import LOAD, SAMPLING, MaxTokens, Model, takes
from colibri_offload.cli.output import note, table
from colibri_offload.errors import ColibriError, TextError, UsageError
from colibri_offload.options import LoadOptions
from colibri_offload.text.sampling import Sampling

_HELP = "/clear forgets the conversation, /stats shows the last answer's cost, /exit or Ctrl-D leaves, Ctrl-C stops"


@takes(LOAD, SAMPLING)
def chat(load: LoadOptions, sampling: Sampling, model: Model, max_tokens: MaxTokens = 512) -> None:
    """Talk with a model that has a chat template. Commands: /clear, /stats, /exit."""
    from colibri_offload.cli.loading import loaded  # late: usage errors and --help need no compiler

    with loaded(model, load) as engine:
        if not engine.tokenizer.chat_template:
            raise TextError(f"{model}: has no chat template, it only continues text; use `colibri run`")
        _Conversation(engine, max_tokens, sampling).run()


class _Conversation:
    """The loop over lines. On a terminal an error or Ctrl-C ends one answer, through a pipe it ends the program."""

    def __init__(self, engine, max_tokens: int, sampling: Sampling):
        self._engine, self._max_tokens, self._sampling = engine, max_tokens, sampling
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._chat = engine.chat()

    def run(self) -> None:
        if self._interactive:
            with suppress(ImportError):  # not on Windows: then lines cannot be recalled
                import readline  # noqa: F401  input() uses it: editing and history
            note(_HELP)
        while (line := self._line()) is not None:
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line:
                self._answer(line)

    def _line(self) -> str | None:
        """The next line, stripped; "" after Ctrl-C; None at the end."""
        try:
            return input("> " if self._interactive else "").strip()
        except UnicodeDecodeError as error:
            raise UsageError(f"stdin: byte {error.start} of a line is not UTF-8; send text as UTF-8") from error
        except EOFError:
            if self._interactive:
                print()
            return None
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            print()
            return ""

    def _command(self, line: str) -> bool:
        """Whether to go on."""
        if line == "/exit":
            return False
        if line == "/clear":
            self._chat.close()
            self._chat = self._engine.chat()
        elif line == "/stats":
            self._show_stats()
        else:
            note(f"{line}: unknown; {_HELP}")
        return True

    def _show_stats(self) -> None:
        from colibri_offload.cli.stats import all_rows

        if self._chat.stats is None:
            note("nothing was answered yet")
        else:
            print(table(all_rows(self._chat.stats)), file=sys.stderr)

    def _answer(self, line: str) -> None:
        before = self._chat.messages
        try:
            with closing(self._chat.say(line, self._max_tokens, self._sampling)) as pieces:  # type: ignore[type-var]
                for piece in pieces:
                    print(piece, end="", flush=True)
            print(flush=True)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            print(" [stopped]", flush=True)
        except ColibriError as error:
            if not self._interactive:
                raise
            self._chat.messages = before
            note(f"error: {error} (/clear starts anew)")
