"""colibri chat through a pipe and on a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from cli_support import BUDGET, PROGRAM, program
from golden_util import GOLDEN

from colibri_offload import Engine

QWEN = GOLDEN / "qwen3_moe"


def test_a_pipe_gives_one_answer_per_line():
    with Engine.load(QWEN, memory_budget="4GiB") as engine:
        chat = engine.chat()
        first, second = ("".join(chat.say(text, 12)) for text in ("Hello", "And then?"))
        again = "".join(engine.chat().say("Hello", 12))
    assert first == again
    lines = b"Hello\n\n/stats\nAnd then?\n/clear\nHello\n/frobnicate\n/exit\nnever read\n"
    done = program("chat", "-m", QWEN, "-n", 12, *BUDGET, stdin=lines)
    assert done.code == 0
    assert done.out == f"{first}\n{second}\n{first}\n"
    assert "generated tokens" in done.err
    assert "/frobnicate: unknown" in done.err
    assert "> " not in done.out


def test_the_end_of_a_pipe_ends_the_chat():
    done = program("chat", "-m", QWEN, "-n", 2, *BUDGET, stdin=b"Hello")
    assert done.code == 0
    assert done.out.endswith("\n")


def test_an_error_in_a_pipe_ends_the_program():
    done = program("chat", "-m", QWEN, "--ctx", 8, *BUDGET, stdin=b"Hello\n")
    assert done.code == 2
    assert "--ctx" in done.error


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_has_prompts_and_ctrl_c_stops_one_answer():
    import pty

    control, terminal = pty.openpty()
    command = [*PROGRAM, "chat", "-m", str(QWEN), "-n", "400", "--expert-cache", "1", *BUDGET]
    environment = {**os.environ, "TERM": "dumb"}
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True
    )
    os.close(terminal)
    screen = Screen(control)
    try:
        screen.wait_for("> ")
        os.write(control, b"Hello\r")
        screen.wait_for("Hello\r\n")
        screen.wait_for_more()
        process.send_signal(signal.SIGINT)
        screen.wait_for("[stopped]")
        screen.wait_for("> ")
        os.write(control, b"\x04")
        assert process.wait(timeout=20) == 0
        assert "Traceback" not in screen.text
    finally:
        process.kill()
        process.wait()
        os.close(control)


class Screen:
    """What a terminal has shown so far."""

    def __init__(self, control: int):
        self._control, self.text, self._seen = control, "", 0

    def wait_for(self, words: str, timeout: float = 30.0) -> None:
        end = time.monotonic() + timeout
        while (at := self.text.find(words, self._seen)) < 0:
            assert time.monotonic() < end, f"{words!r} did not appear after {self.text!r}"
            self.text += os.read(self._control, 4096).decode(errors="replace")
        self._seen = at + len(words)

    def wait_for_more(self) -> None:
        if len(self.text) == self._seen:
            self.text += os.read(self._control, 4096).decode(errors="replace")
