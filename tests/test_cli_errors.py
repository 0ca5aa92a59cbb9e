"""Every kind of failure: one line that says what was wrong, and the right exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
from cli_support import BUDGET, PROGRAM, Cli, program
from golden_util import GOLDEN

from colibri_offload import Engine
from colibri_offload.cli.main import main
from colibri_offload.convert import convert

QWEN = GOLDEN / "qwen3_moe"
GGUF = GOLDEN / "gguf" / "qwen3_moe-Q4_0.gguf"


@pytest.fixture
def cli(capsys, monkeypatch):
    monkeypatch.delenv("COLIBRI_DEBUG", raising=False)
    return Cli(capsys)


@pytest.fixture
def broken(tmp_path):
    """Models that cannot be loaded, by what is wrong with them."""
    (tmp_path / "truncated.gguf").write_bytes(GGUF.read_bytes()[:-5000])
    foreign = tmp_path / "foreign"
    shutil.copytree(QWEN, foreign)
    config = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps({**config, "model_type": "frobnitz"}))
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.gguf").write_bytes(b"hello")
    (tmp_path / "latin1.txt").write_bytes("Grün".encode("latin-1"))
    (tmp_path / "nothing.txt").write_bytes(b"\n")
    return tmp_path


def run(*flags: object, model: object = QWEN) -> tuple:
    return ("run", "-m", model, "-p", "x", "-n", 1, *flags)


@pytest.mark.parametrize(
    "model, words",
    [
        ("absent.gguf", ["absent.gguf", "does not exist"]),
        ("truncated.gguf", ["truncated.gguf"]),
        ("text.gguf", ["text.gguf"]),
        ("foreign", ["foreign", "'frobnitz'", "qwen3_moe"]),
        ("empty", ["empty directory"]),
    ],
)
@pytest.mark.parametrize("command", ["run", "inspect", "verify", "convert"])
def test_models_that_cannot_be_loaded(cli, broken, command, model, words):
    path = broken / model
    arguments = {
        "run": run(model=path),
        "inspect": ("inspect", path),
        "verify": ("verify", path, "--json"),
        "convert": ("convert", "--input", path, "--output", broken / "out"),
    }
    done = cli(*arguments[command])
    assert done.code == 1
    assert all(word in done.error for word in words), done.error
    assert done.out == ""
    assert not (broken / "out").exists()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--frobnicate"], ["--frobnicate"]),
        (["--threads", "many"], ["--threads", "'many' is not a whole number"]),
        (["--seed", "1.5"], ["--seed", "'1.5' is not a whole number"]),
        (["--top-p", "half"], ["--top-p", "'half' is not a number"]),
        (["-n", "2k"], ["-n", "'2k'"]),
        (["--threads", "-1"], ["--threads", "-1"]),
        (["--memory-budget", "8XB"], ["--memory-budget", "8XB", "4GiB"]),
        (["--expert-cache", "lots"], ["--expert-cache", "lots"]),
        (["--expert-cache", "0"], ["--expert-cache", "0"]),
        (["--activations", "int3"], ["--activations", "int3", "float32"]),
        (["--eviction", "fifo"], ["--eviction", "fifo", "lru"]),
        (["--io", "carrier-pigeon"], ["--io", "direct"]),
        (["--temperature", "-1"], ["--temperature", "-1"]),
        (["--top-p", "0"], ["--top-p"]),
        (["--seed", "-5"], ["--seed", "-5"]),
        (["-n", "-3"], ["-3", "negative"]),
        (["--ctx", "999999"], ["--ctx", "999999"]),
        (["--prompt-file", "also.txt"], ["prompt", "both"]),
        (["--trace", "x.json"], ["--trace"]),
    ],
)
def test_flags_that_cannot_be_used(cli, flags, words):
    done = cli(*run(*flags))
    assert done.code == 2
    assert all(word in done.error for word in words), done.error
    assert done.out == ""


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], ["prompt", "-p TEXT"]),
        (["-p", ""], ["empty"]),
        (["--prompt-file", "absent.txt"], ["absent.txt", "No such file"]),
        (["--prompt-file", "latin1.txt"], ["latin1.txt", "byte 2", "UTF-8"]),
        (["--prompt-file", "nothing.txt"], ["empty"]),
        (["--prompt-file", "empty"], ["empty", "directory"]),
    ],
)
def test_prompts_that_cannot_be_used(cli, broken, monkeypatch, flags, words):
    monkeypatch.chdir(broken)
    done = cli("run", "-m", QWEN, *flags)
    assert done.code == 2
    assert all(word in done.error for word in words), done.error


def test_stdin_that_is_not_utf8():
    done = program("run", "-m", QWEN, "-p", "-", stdin=b"ab\xff")
    assert (done.code, done.out) == (2, "")
    assert "stdin: byte 2 is not UTF-8" in done.error


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_output_that_is_full():
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*PROGRAM, "families"], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 1
    assert done.stderr.decode() == "error: [Errno 28] No space left on device: check the file and its disk\n"


@pytest.mark.parametrize("flags", [["--memory-budget", "1MiB"], ["--expert-cache", "1KiB", *BUDGET]])
def test_a_budget_that_is_too_small(cli, flags):
    done = cli(*run(*flags))
    assert done.code == 1
    assert flags[0] in done.error
    assert "KiB" in done.error or "MiB" in done.error


def test_a_prompt_longer_than_the_context(cli):
    done = cli(*run("--ctx", 8, "--raw", "-p", "a b c d e f g h i j k l m n", *BUDGET))
    assert done.code == 2
    assert "--ctx" in done.error


def test_a_model_without_tokenizer_cannot_take_text(cli):
    done = cli(*run(*BUDGET, model=GOLDEN / "llama"))
    assert done.code == 1
    assert "tokenizer" in done.error


def test_a_chat_needs_a_template(cli):
    done = cli("chat", "-m", "demo", *BUDGET)
    assert done.code == 1
    assert "chat template" in done.error


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["frobnicate"], ["frobnicate"]),
        (["run", "-p", "x"], ["--model"]),
        (["-p", "x"], ["--model"]),
        (["convert", "--input", "x"], ["--output"]),
        (["convert", "--input", QWEN, "--output", "o", "--quant", "q9"], ["--quant q9", "q8_0"]),
        (["convert", "--input", QWEN, "--output", "o", "--store", "tape"], ["--store tape", "lmdb"]),
        (["inspect"], ["MODEL"]),
        (["demo", "-p", ""], ["empty"]),
        (["--frobnicate"], ["--frobnicate"]),
    ],
)
def test_command_lines_that_cannot_be_used(cli, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    done = cli(*arguments)
    assert done.code == 2
    assert all(word in done.error for word in words), done.error


def test_a_store_in_the_way(cli, tmp_path):
    convert(QWEN, tmp_path / "s")
    done = cli("convert", "--input", QWEN, "--output", tmp_path / "s")
    assert done.code == 1
    assert "already" in done.error


def test_a_bug_is_called_one(cli, monkeypatch):
    def load(*args, **options):
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr(Engine, "load", load)
    done = cli(*run())
    assert done.code == 1
    assert done.error == (
        "error: ZeroDivisionError: division by zero: this is a bug, please report it; --debug shows where"
    )


def test_debug_shows_the_traceback(cli, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("COLIBRI_DEBUG", "0")
    assert "Traceback" not in cli(*run(model=tmp_path / "x")).err
    monkeypatch.setenv("COLIBRI_DEBUG", "1")
    done = cli(*run(model=tmp_path / "x"))
    assert done.code == 1
    assert "Traceback" in done.err
    assert done.err.splitlines()[-1].startswith("error: ")
    monkeypatch.setenv("COLIBRI_DEBUG", "")
    assert main(["--debug", *map(str, run(model=tmp_path / "x"))]) == 1
    assert "Traceback" in capsys.readouterr().err
