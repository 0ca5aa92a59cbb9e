"""colibri convert as a program: messages, interruption, and going on after it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time

import pytest
from cli_support import PROGRAM, Cli, program
from golden_util import GOLDEN

from colibri_offload.cli.main import main
from colibri_offload.convert import convert
from colibri_offload.storage.open import open_store

QWEN = GOLDEN / "qwen3_moe"


def digest(path) -> str:
    with open_store(path) as store:
        return store.manifest.digest


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


def test_convert_says_what_it_made(cli, tmp_path):
    done = cli("convert", "--input", QWEN, "--output", tmp_path / "s", "--quant", "q4_0", "--low-memory")
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith(f"{tmp_path / 's'}: ")
    assert cli("convert", "--input", QWEN, "--output", tmp_path / "s", "--overwrite").code == 0


def test_convert_warns_about_a_missing_tokenizer(cli, tmp_path):
    assert (
        "warning: the store has no tokenizer"
        in cli("convert", "--input", GOLDEN / "llama", "--output", tmp_path / "s").err
    )


def test_an_interruption_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    """Ctrl-C in the middle; then the very command that was printed."""
    from colibri_offload.cli.output import Meter

    calls, original = [], Meter.__call__

    def stop(self, what, done, total):
        original(self, what, done, total)
        calls.append(what)
        if len(calls) == 30:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    monkeypatch.setattr(Meter, "__call__", stop)
    output = tmp_path / "with space"
    assert main(["convert", "--input", str(QWEN), "--output", str(output), "--quant", "q4_0", "--store", "lmdb"]) == 130
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0
    command = shlex.split(said.partition("go on with: ")[2])
    assert command[0] == "colibri"
    monkeypatch.undo()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    assert main(command[1:]) == 0
    convert(QWEN, tmp_path / "whole", "q4_0", store="lmdb")
    assert digest(output) == digest(tmp_path / "whole")


def test_killed_at_any_moment_it_resumes_to_the_same_digest(tmp_path):
    """kill -9 at a random moment of the real program: before, while or after it writes."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "0"}
    source = GOLDEN / "gpt_oss_mxfp4"
    command = [*PROGRAM, "convert", "--input", str(source), "--output", str(tmp_path / "s"), "--quant", "keep"]
    started = time.monotonic()
    subprocess.run(
        [*command[:-3], str(tmp_path / "whole"), *command[-2:]], check=True, env=environment, capture_output=True
    )
    duration = time.monotonic() - started
    for share in (0.7, 0.9):
        with subprocess.Popen([*command, "--resume"], env=environment, stderr=subprocess.DEVNULL) as process:
            time.sleep(duration * share)
            process.kill()
    if not (tmp_path / "s").exists():
        done = program(*command[len(PROGRAM) :], "--resume", env=environment)
        assert done.code == 0, done.err
    assert digest(tmp_path / "s") == digest(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s", "whole"]
