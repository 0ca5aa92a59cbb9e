"""colibri inspect, verify, families, --version and --help."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from cli_support import Cli, program
from golden_util import GOLDEN
from safetensors.numpy import load_file, save_file

from colibri_offload.cli.checks import check_model
from colibri_offload.convert import convert
from colibri_offload.families.registry import BY_MODEL_TYPE
from colibri_offload.graph.source import CheckpointSource, StoreSource

QWEN = GOLDEN / "qwen3_moe"
COMMANDS = ("run", "chat", "demo", "convert", "inspect", "verify", "families")
RUN_FLAGS = (
    "--model", "--prompt", "--prompt-file", "-n", "--threads", "--ctx", "--expert-cache", "--gpu-layers",
    "--vram-budget", "--memory-budget", "--activations", "--prefetch", "--no-prefetch", "--preload",
    "--lazy", "--eviction", "--io", "--placement", "--batch-size", "--temperature", "--top-p", "--top-k", "--min-p",
    "--repeat-penalty", "--seed", "--raw", "--json", "--stats",
)  # fmt: skip


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


def test_version_and_help():
    assert program("--version").out == "colibri-offload 0.1.0\n"
    assert program().out == program("-h").out
    shown = program("--help").out
    assert all(f"  {command} " in shown for command in COMMANDS)


def test_help_of_run_has_every_flag_of_the_contract(cli):
    shown = cli("run", "--help").out
    words = set(shown.replace(",", " ").replace("/", " ").split())
    assert [flag for flag in RUN_FLAGS if flag not in words] == []


def test_inspect_json(cli):
    facts = json.loads(cli("inspect", QWEN, "--json").out)
    config = json.loads((QWEN / "config.json").read_text())
    assert facts["family"] == "qwen3_moe"
    assert facts["layers"] == config["num_hidden_layers"]
    assert facts["experts_per_layer"] == config["num_experts"]
    assert facts["top_k"] == config["num_experts_per_tok"]
    assert facts["max_context"] == config["max_position_embeddings"]
    assert facts["vocab"] == config["vocab_size"]
    assert facts["tokenizer"]["chat_template"] is True
    assert facts["file_bytes"] == (QWEN / "model.safetensors").stat().st_size
    assert facts["total_bytes"] == sum(group["bytes"] for group in facts["groups"])
    assert facts["resident_bytes"] + facts["expert_bytes"] == facts["total_bytes"]
    experts = config["moe_intermediate_size"] * config["hidden_size"] * 3 * 4
    assert facts["expert_block_bytes"] == experts
    assert facts["expert_bytes"] == experts * facts["expert_blocks"]


def test_inspect_names_formats_by_group(cli):
    source = GOLDEN / "gguf" / "gpt_oss-MXFP4.gguf"
    groups = {g["group"]: g["formats"] for g in json.loads(cli("inspect", source, "--json").out)["groups"]}
    assert set(groups["experts"]) == {"MXFP4", "F32"}  # F32: the biases
    assert set(groups["attention"]) == {"Q8_0"}
    assert set(groups["routers"]) == set(groups["vectors"]) == {"F32"}


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "deepseek_v3", "llama", "gguf/gpt_oss-Q8_0.gguf"])
def test_inspect_reads_no_weights(cli, name, monkeypatch):
    for source in (CheckpointSource, StoreSource):
        monkeypatch.setattr(source, "load_resident", lambda *args: pytest.fail("weights were read"))
    done = cli("inspect", GOLDEN / name)
    assert done.code == 0
    assert "always resident" in done.out
    assert "experts" in done.out


def test_inspect_a_store_says_where_it_came_from(cli, tmp_path):
    convert(QWEN, tmp_path / "s", "q4_0", store="lmdb")
    assert "from qwen3_moe to q4_0 by colibri-offload" in cli("inspect", tmp_path / "s").out
    assert json.loads(cli("inspect", tmp_path / "s", "--json").out)["kind"] == "LMDB store"


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "gpt_oss_mxfp4", "deepseek_v3_fp8", "qwen3_moe_awq", "gguf/mixtral-Q4_0.gguf"]
)
def test_verify_finds_nothing_in_a_sound_model(cli, name):
    done = cli("verify", GOLDEN / name)
    assert done.code == 0
    assert "nothing is broken" in done.out
    answer = json.loads(cli("verify", GOLDEN / name, "--json").out)
    assert answer["ok"] is True
    assert answer["checked_bytes"] > 0


def test_verify_reads_every_tensor_once(monkeypatch):
    import colibri_offload.checkpoint.base as base
    import colibri_offload.checkpoint.rows as rows

    read, original = [], base.read_slice
    for module in (base, rows):
        monkeypatch.setattr(module, "read_slice", lambda part: (read.append(part), original(part))[1])
    assert check_model(str(QWEN), lambda *args: None) == []
    size = (QWEN / "model.safetensors").stat().st_size
    assert size - 100_000 < sum(part.nbytes for part in read) <= size
    assert len(set(read)) == len(read)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_verify_names_a_tensor_with_unusable_numbers(cli, value, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(QWEN, folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    weights[name] = weights[name].copy()
    weights[name][-1, -1] = value
    save_file(weights, folder / "model.safetensors")
    done = cli("verify", folder)
    assert done.code == 1
    assert done.out.count("\n") == 1
    assert name in done.out
    assert "1 part(s) are broken" in done.error


def test_verify_names_a_block_with_an_unusable_scale(cli, tmp_path):
    """Q4_0: the first two bytes of a block are its f16 scale."""
    source = GOLDEN / "gguf" / "qwen3_moe-Q4_0.gguf"
    import gguf

    tensor = next(t for t in gguf.GGUFReader(source).tensors if t.name == "blk.1.ffn_down_exps.weight")
    data = bytearray(source.read_bytes())
    at = int(tensor.data_offset) + 18 * 7
    data[at : at + 2] = b"\x00\x7c"  # f16 infinity
    (tmp_path / "bad.gguf").write_bytes(data)
    done = cli("verify", tmp_path / "bad.gguf", "--json")
    assert done.code == 1
    answer = json.loads(done.out)
    assert answer["ok"] is False
    assert len(answer["broken"]) == 1
    assert "blk.1.ffn_down_exps.weight" in answer["broken"][0]


@pytest.mark.parametrize(
    "file, place, words", [("experts.bin", 4096 + 10, "layer 0 expert 0"), ("resident.bin", 5000, "resident embed")]
)
def test_verify_names_a_damaged_record(cli, file, place, words, tmp_path):
    convert(QWEN, tmp_path / "s")
    data = bytearray((tmp_path / "s" / file).read_bytes())
    data[place] ^= 1
    (tmp_path / "s" / file).write_bytes(data)
    done = cli("verify", tmp_path / "s")
    assert done.code == 1
    assert done.out == words + "\n"
    assert "1 part(s) are broken" in done.error


def test_verify_names_a_changed_tokenizer(cli, tmp_path):
    convert(QWEN, tmp_path / "s", store="lmdb")
    with open(tmp_path / "s" / "tokenizer.json", "a") as file:
        file.write(" ")
    assert cli("verify", tmp_path / "s").out == "file tokenizer.json\n"


def test_families(cli):
    listed = json.loads(cli("families", "--json").out)
    assert {name for family in listed["families"] for name in family["model_types"]} == set(BY_MODEL_TYPE)
    assert {"MXFP4", "Q4_K", "BF16"} <= set(listed["formats"])
    assert {"q8_0", "q4_0", "keep"} <= set(listed["quants"])
    shown = cli("families").out
    assert "deepseek_v3" in shown
    assert "gpt-oss" in shown
    assert "awq" in shown
