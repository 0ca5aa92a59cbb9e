"""colibri run and demo: what goes to stdout, what to stderr, and how a run ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from cli_support import BUDGET, PROGRAM, Cli, program
from golden_util import GOLDEN

from colibri_offload import Engine
from colibri_offload.convert import convert
from colibri_offload.session import RunStats

QWEN = GOLDEN / "qwen3_moe"
DATA = Path(__file__).parent / "data"
PROMPT = "And it came to pass"


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


@pytest.fixture(scope="module")
def demo_text():
    """The demo's greedy continuation and its ids, from the Python API."""
    with Engine.load("demo", memory_budget="4GiB") as engine:
        out = engine.generate(PROMPT, 12)
    return out.text, out.token_ids


def test_text_goes_to_stdout_and_the_rest_to_stderr(demo_text):
    done = program("run", "-m", "demo", "-p", PROMPT, "-n", 12, "--stats", "--expert-cache", 8)
    assert (done.code, done.out) == (0, demo_text[0] + "\n")
    assert "2.26 MiB resident, 48 of 192 experts cached (4.78 MiB), 14.34 MiB left on disk" in done.err
    assert "expert misses" in done.err
    assert "\x1b" not in done.out + done.err


def test_run_is_the_command_when_none_is_named(cli, demo_text):
    assert cli("-m", "demo", "-p", PROMPT, "-n", 12, *BUDGET).out == demo_text[0] + "\n"


def test_json_prints_exactly_one_object(cli, demo_text):
    done = cli("run", "-m", "demo", "-p", PROMPT, "-n", 12, "--json", "--expert-cache", 2, *BUDGET)
    assert done.code == 0
    assert done.out.count("\n") == 1
    answer = json.loads(done.out)
    assert list(answer) == ["text", "token_ids", "stats"]
    assert (answer["text"], answer["token_ids"]) == demo_text
    assert set(answer["stats"]) == {f.name for f in fields(RunStats)}
    assert answer["stats"]["generated_tokens"] == 12
    assert answer["stats"]["expert_misses"] > 0


def test_prompt_from_a_file_and_from_stdin(cli, demo_text, tmp_path, monkeypatch):
    (tmp_path / "p ö.txt").write_bytes(PROMPT.encode() + b"\n")
    assert cli("run", "-m", "demo", "--prompt-file", tmp_path / "p ö.txt", "-n", 12, *BUDGET).out == demo_text[0] + "\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode() + b"\r\n")))
    assert cli("run", "-m", "demo", "-p", "-", "-n", 12, *BUDGET).out == demo_text[0] + "\n"


def test_the_chat_template_is_applied_unless_raw(cli):
    with Engine.load(QWEN, memory_budget="4GiB") as engine:
        chat = engine.tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
        asked = {"chat": engine.generate(chat, 8).token_ids, "raw": engine.generate("Hello", 8).token_ids}
        assert asked["chat"] != asked["raw"]
    common = ("run", "-m", QWEN, "-p", "Hello", "-n", 8, "--json", *BUDGET)
    assert json.loads(cli(*common).out)["token_ids"] == asked["chat"]
    assert json.loads(cli(*common, "--raw").out)["token_ids"] == asked["raw"]


def test_sampling_flags_reach_the_sampler(cli):
    def ids(*flags):
        common = ("run", "-m", "demo", "-p", PROMPT, "-n", 16, "--json", "--temperature", 1.5, *BUDGET)
        return json.loads(cli(*common, *flags).out)["token_ids"]

    assert ids("--seed", 3) == ids("--seed", 3)
    assert ids("--seed", 3) != ids("--seed", 4)
    assert ids("--seed", 3, "--top-k", 1) == ids("--seed", 4, "--top-p", 1e-9) == ids("--min-p", 1)


def test_load_flags_reach_the_engine(cli, monkeypatch):
    seen = {}

    def load(model, progress=None, **options):
        seen.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "load", load)
    flags = "--threads 1 --ctx 64 --expert-cache 2GiB --memory-budget 3GiB --activations float32 --no-prefetch --lazy"
    more = "--eviction lfru --io buffered --kv-cache f32 --batch-size 7"
    gpu = "--gpu-layers 2 --vram-budget 1GiB --placement attn=gpu"
    done = cli("run", "-m", "demo", "-p", "x", *flags.split(), *more.split(), *gpu.split())
    assert seen == {
        "threads": 1, "ctx": 64, "expert_cache": "2GiB", "memory_budget": "3GiB", "activations": "float32",
        "prefetch": False, "preload": False, "eviction": "lfru", "io": "buffered", "kv_cache": "f32", "batch_size": 7,
        "gpu_layers": 0, "vram_budget": "auto", "placement": "",  # warned about, and then not asked of the engine
    }  # fmt: skip
    assert done.code == 130
    warning, last = done.err.splitlines()
    assert warning.startswith("warning: --gpu-layers, --vram-budget, --placement: this version has no GPU backend")
    assert last == "interrupted"


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_a_converted_store_gives_the_same_tokens(cli, kind, tmp_path):
    source = GOLDEN / "gguf" / "qwen3_moe-Q8_0.gguf"
    assert cli("convert", "--input", source, "--output", tmp_path / "s", "--quant", "keep", "--store", kind).code == 0
    outputs = [
        json.loads(cli("run", "-m", model, "-p", "Hello", "-n", 12, "--raw", "--json", *BUDGET).out)["token_ids"]
        for model in (source, tmp_path / "s")
    ]
    assert outputs[0] == outputs[1]


def test_interrupted_run_ends_with_130_and_a_clean_line(tmp_path):
    """Long enough that it cannot end by itself: 500 tokens one by one, with a cache that holds hardly anything."""
    command = [*PROGRAM, "run", "-m", "demo", "-p", PROMPT, "-n", "900", "--expert-cache", "1", "--no-prefetch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == "interrupted"
    assert b"Traceback" not in err


def test_a_reader_that_goes_away_is_no_error():
    command = [*PROGRAM, "run", "-m", "demo", "-p", PROMPT, "-n", "900"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read().decode()
        process.wait(timeout=30)
    assert process.returncode == 141
    assert len(err.splitlines()) == 1, err  # what was loaded
    assert "resident" in err


def test_a_terminal_without_unicode_shows_escapes(tmp_path):
    (tmp_path / "ü.gguf").write_bytes((GOLDEN / "gguf" / "qwen3_moe-Q4_0.gguf").read_bytes())
    done = program("inspect", tmp_path / "ü.gguf", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.code == 0
    assert "\\xfc.gguf" in done.out


# --- the bundled model --------------------------------------------------------------------------------------------


def test_demo_shows_the_cache_at_work():
    done = program("demo", "-n", 24, "--seed", 2)
    assert done.code == 0
    assert done.out.startswith("And it came to pass")
    numbers = dict(line.rsplit("  ", 1) for line in done.out.splitlines() if "  " in line)
    table = {key.strip(): value.strip() for key, value in numbers.items()}
    assert int(table["expert hits"]) > 0
    assert int(table["expert misses"]) > 0
    assert {"hit rate", "bytes read", "prefetch used", "prefetch wasted", "decode tokens/s"} <= set(table)
    assert "48 of 192 experts cached" in done.err


def test_demo_json(cli):
    answers = [json.loads(cli("demo", "-n", 16, "--json", "-p", "def __init__(self", *BUDGET).out) for _ in range(2)]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]  # the seed is fixed
    assert len(answers[0]["token_ids"]) == 16
    assert answers[0]["stats"]["expert_misses"] > 0
    assert 0 < answers[0]["stats"]["expert_hit_rate"] < 1


@pytest.mark.parametrize("sequence", [0, 1])
def test_the_bundled_weights_are_close_to_the_trained_ones(sequence):
    """Q8_0 against float32 arithmetic on the bf16 weights, by Hugging Face transformers."""
    with np.load(DATA / "demo_golden.npz") as golden:
        ids, reference = golden[f"input_ids_{sequence}"].tolist(), golden[f"logits_{sequence}"]
    with Engine.load("demo", activations="float32", memory_budget="4GiB") as engine:
        error = np.abs(engine.logits(ids) - reference).max(1) / np.abs(reference).max()
    assert np.median(error) <= 0.03


def test_the_bundled_store_names_no_folder_and_is_small(cli):
    import colibri_offload

    folder = Path(colibri_offload.__file__).parent / "data" / "demo"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 25e6
    text = (folder / "manifest.json").read_text()
    assert json.loads(text)["model"]["provenance"]["source"] == "demo-model"
    assert "/" not in json.dumps(json.loads(text)["model"]["provenance"])
    assert (folder / "README.md").is_file()
    assert cli("verify", "demo").code == 0


def test_demo_is_the_only_word_that_is_no_path(cli, tmp_path, monkeypatch):
    convert(QWEN, tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    assert json.loads(cli("inspect", "demo", "--json").out)["provenance"]["source"] == "qwen3_moe"
