"""Families: both spellings of a configuration, tensor layouts, shape checks, routing of names, JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_util import FIXTURES, GOLDEN, HUB, Fixture, check_logits, load_golden
from reference import load, reference_forward
from safetensors.numpy import load_file, save_file

from colibri_offload.checkpoint.open import open_checkpoint
from colibri_offload.errors import CheckpointError, ColibriError, UnsupportedError
from colibri_offload.families.config import Config
from colibri_offload.families.registry import BY_MODEL_TYPE
from colibri_offload.families.resolve import Weights, load_model_spec, spec_from_json, spec_to_json
from colibri_offload.families.spec import Attention, Dense, LatentAttention, ModelSpec, MoE

Tensors = dict[str, np.ndarray]


def config_of(name: str, file: str = "config.json") -> dict[str, Any]:
    return json.loads((GOLDEN / name / file).read_text())


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return BY_MODEL_TYPE[config["model_type"]].spec(Config(config, "config.json"))


def changed(name: str, out: Path, change: Callable[[Tensors], None], **config: Any) -> Path:
    """A copy of a fixture with changed tensors and configuration keys."""
    shutil.copytree(GOLDEN / name, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config_of(name) | config))
    return out


def open_spec(path: Path) -> tuple[ModelSpec, Weights]:
    return load_model_spec(open_checkpoint(path))


@pytest.mark.parametrize("name", [f.name for f in HUB if (f.path / "config_v5.json").exists()])
def test_both_spellings_of_a_configuration_give_one_spec(name: str) -> None:
    assert spec_of(config_of(name)) == spec_of(config_of(name, "config_v5.json"))


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda f: f.name)
def test_json_gives_the_spec_back_exactly(fixture: Fixture) -> None:
    spec, _ = open_spec(fixture.path)
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d["final_norm"].update({"is": "LayerNorm"}), "LayerNorm"),
        (lambda d: d.pop("vocab"), r"ModelSpec has missing or unknown fields \['vocab'\]"),
        (lambda d: d.update(colour="red"), "colour"),
        (lambda d: d.update({"is": "Norm"}), "Norm"),
    ],
)
def test_damaged_json_is_refused(damage: Callable[[dict[str, Any]], Any], message: str) -> None:
    data = spec_to_json(spec_of(config_of("qwen3_moe")))
    damage(data)
    with pytest.raises(CheckpointError, match=message):
        spec_from_json(data)


@pytest.mark.parametrize("data", [None, [], 3, {}, {"is": "Norm", "eps": 1e-6, "weight_offset": 0.0}])
def test_json_that_is_no_spec_is_refused(data: Any) -> None:
    with pytest.raises(CheckpointError):
        spec_from_json(data)


# ---- facts of single families


def test_token_ids_come_from_both_configurations() -> None:
    spec, _ = open_spec(GOLDEN / "qwen3_moe")
    assert (spec.bos_id, spec.eos_ids) == (480, (482, 480))


def test_dense_and_routing_layers() -> None:
    assert [type(layer.ffn) for layer in spec_of(config_of("qwen2_moe")).layers] == [Dense, MoE]
    assert spec_of(config_of("deepseek_v3")).moe_layers == (1, 2)
    assert spec_of(config_of("qwen3_moe") | {"decoder_sparse_step": 2}).moe_layers == (1,)
    assert spec_of(config_of("qwen3_moe") | {"mlp_only_layers": [0, 2]}).moe_layers == (1,)


def windows(config: dict[str, Any]) -> list[int | None]:
    return [layer.mixer.window for layer in spec_of(config).layers if isinstance(layer.mixer, Attention)]


def test_windows() -> None:
    assert windows(config_of("gpt_oss")) == [8, None, 8]
    bare = {k: v for k, v in config_of("gpt_oss").items() if k != "layer_types"}
    assert windows(bare) == [8, None, 8]
    assert windows(config_of("mixtral_swa")) == [7, 7]
    assert windows(config_of("qwen2_moe")) == [None, None]
    on = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    assert windows(config_of("qwen2_moe") | on) == [None, 5]
    assert windows(config_of("qwen3") | on) == [None, 5]
    assert windows(config_of("qwen3_moe") | on) == [5, 5, 5]


def test_kimi_k2_is_deepseek_v3() -> None:
    assert spec_of(config_of("deepseek_v3") | {"model_type": "kimi_k2"}) == spec_of(config_of("deepseek_v3"))


def test_deepseek_softmax_scale_has_mscale_squared() -> None:
    mixer = spec_of(config_of("deepseek_v2")).layers[0].mixer
    assert isinstance(mixer, LatentAttention)
    assert mixer.scale == pytest.approx(24**-0.5 * (0.1 * 0.707 * np.log(40) + 1) ** 2)
    assert mixer.rope.attention_factor == 1.0 and mixer.rope.interleaved


def test_head_dim_that_is_null_is_derived() -> None:
    (mixer,) = {layer.mixer for layer in spec_of(config_of("mixtral") | {"head_dim": None}).layers}
    assert isinstance(mixer, Attention) and mixer.head_dim == 16


# ---- configurations that must be refused

REFUSED: list[tuple[str, dict[str, Any], type[ColibriError], str]] = [
    ("llama", {"model_type": "mamba"}, UnsupportedError, r"'mamba'.*deepseek_v2.*gpt_oss.*qwen3_moe"),
    ("llama", {"model_type": None}, CheckpointError, "model_type"),
    ("llama", {"mlp_bias": True}, UnsupportedError, "mlp_bias"),
    ("llama", {"hidden_act": "gelu"}, UnsupportedError, "hidden_act.*gelu"),
    ("llama", {"num_hidden_layers": 1 << 60}, CheckpointError, "num_hidden_layers"),
    ("llama", {"num_hidden_layers": 2.5}, CheckpointError, "num_hidden_layers is 2.5"),
    ("llama", {"num_hidden_layers": True}, CheckpointError, "num_hidden_layers is True"),
    ("llama", {"hidden_size": None}, CheckpointError, "'hidden_size' is missing"),
    ("llama", {"hidden_size": -64}, CheckpointError, "hidden_size is -64"),
    ("llama", {"num_key_value_heads": 3}, CheckpointError, "num_key_value_heads 3"),
    ("llama", {"rms_norm_eps": 0}, CheckpointError, "rms_norm_eps is 0"),
    ("llama", {"rope_theta": "big"}, CheckpointError, "rope_theta is 'big'"),
    ("llama", {"tie_word_embeddings": "no"}, CheckpointError, "tie_word_embeddings"),
    ("llama", {"rope_scaling": "yarn"}, CheckpointError, "rope_scaling"),
    ("olmoe", {"clip_qkv": 8.0}, UnsupportedError, "clip_qkv is 8.0"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, UnsupportedError, "topk_method"),
    ("deepseek_v3", {"scoring_func": "softmax"}, UnsupportedError, "scoring_func"),
    ("deepseek_v3", {"attention_bias": True}, UnsupportedError, "attention_bias"),
    ("deepseek_v3", {"n_group": 5}, CheckpointError, "12 experts do not divide into 5 groups"),
    ("deepseek_v3", {"topk_group": 4}, CheckpointError, "4 groups per token are more than the 3"),
    ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 5}, CheckpointError, "fewer than 5 experts per token"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, CheckpointError, "9 experts per token"),
    ("qwen2_moe", {"mlp_only_layers": 0}, CheckpointError, "mlp_only_layers"),
    ("mixtral", {"num_local_experts": 0}, CheckpointError, "number of routed experts is 0"),
    ("gpt_oss", {"layer_types": ["full_attention"]}, CheckpointError, "layer_types"),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 3}, UnsupportedError, "chunked_attention"),
]


@pytest.mark.parametrize(("name", "change", "error", "message"), REFUSED)
def test_a_bad_configuration_is_named(
    name: str, change: dict[str, Any], error: type[ColibriError], message: str, tmp_path: Path
) -> None:
    path = changed(name, tmp_path / "model", lambda tensors: None, **change)
    with pytest.raises(error, match=message) as caught:
        open_spec(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


# ---- tensors


def merge_experts(tensors: Tensors) -> None:
    """As transformers 5 keeps them: gate over up [E, 2·I, H]."""
    for n in range(3):
        prefix = f"model.layers.{n}.mlp.experts."
        parts = {
            part: np.stack([tensors.pop(f"{prefix}{e}.{part}_proj.weight") for e in range(8)])
            for part in ("gate", "up", "down")
        }
        tensors[prefix + "gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], 1)
        tensors[prefix + "down_proj"] = parts["down"]


def test_merged_experts_load_like_single_ones(tmp_path: Path) -> None:
    fixture = Fixture(GOLDEN / "qwen3_moe", 1e-5)
    spec, weights = open_spec(changed("qwen3_moe", tmp_path / "model", merge_experts))
    golden = load_golden(fixture)
    check_logits(reference_forward(spec, weights, golden["input_ids_0"])[0], golden, 0, 1e-5)
    assert weights.unused() == []
    # One expert's gate is a run of rows: its bytes alone are read.
    assert weights.tensor("experts.gate", 1, 3).nbytes == 32 * 64 * 4


def test_merged_experts_of_another_count_are_refused(tmp_path: Path) -> None:
    path = changed("qwen3_moe", tmp_path / "model", merge_experts, num_experts=6)
    with pytest.raises(CheckpointError, match=r"router|expected 6 experts"):
        open_spec(path)


@pytest.mark.parametrize("fixture", HUB, ids=lambda f: f.name)
def test_every_slot_has_its_shape(fixture: Fixture) -> None:
    spec, weights = open_spec(fixture.path)
    for slot, layer in weights.slots():
        assert weights.has(slot, layer)
        expert = 1 if slot.startswith("experts.") else None
        tensor = weights.tensor(slot, layer, expert)
        assert load(tensor).shape == tensor.shape
    assert weights.has("head") is not spec.tied
    assert not weights.has("sinks", len(spec.layers))


def test_experts_are_asked_for_one_by_one() -> None:
    _, weights = open_spec(GOLDEN / "qwen3_moe")
    for expert in (None, -1, 8):
        with pytest.raises(IndexError, match="experts 0 to 7"):
            weights.tensor("experts.up", 0, expert)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("mixtral", "model.norm.weight"),
        ("mixtral", "lm_head.weight"),
        ("mixtral", "model.layers.2.block_sparse_moe.experts.7.w3.weight"),
        ("qwen2_moe", "model.layers.1.mlp.shared_expert_gate.weight"),
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj.weight"),
        ("gpt_oss", "model.layers.1.self_attn.sinks"),
    ],
)
def test_a_missing_tensor_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        del tensors[tensor]

    with pytest.raises(CheckpointError, match=rf"{tensor}.*missing|missing \({tensor}"):
        open_spec(changed(name, tmp_path / "model", drop))


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("mixtral", "model.embed_tokens.weight", (511, 64)),
        ("mixtral", "model.layers.2.block_sparse_moe.experts.7.w3.weight", (64, 32)),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight", (16,)),
        ("olmoe", "model.layers.0.self_attn.q_norm.weight", (16,)),
        ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj.weight", (256, 32)),
        ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj.weight", (191, 32)),
        ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj_bias", (8, 66)),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj", (8, 64, 64)),
    ],
)
def test_a_wrong_shape_is_named(name: str, tensor: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    def reshape(tensors: Tensors) -> None:
        tensors[tensor] = np.zeros(shape, np.float32)

    with pytest.raises(CheckpointError, match=tensor) as caught:
        open_spec(changed(name, tmp_path / "model", reshape))
    assert str(list(shape)) in str(caught.value) and "\n" not in str(caught.value)


def test_leftover_tensors_are_told_apart(tmp_path: Path) -> None:
    """What a released checkpoint may carry is passed over; a bias that the spec does not know is reported."""

    def add(tensors: Tensors) -> None:
        for name in (
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            "model.layers.3.embed_tokens.weight",
            "model.mtp.layers.0.weight",
            "model.visual.blocks.0.attn.qkv.weight",
            "model.layers.0.self_attn.q_proj.bias",
        ):
            tensors[name] = np.zeros(4, np.float32)

    _, weights = open_spec(changed("qwen3_moe", tmp_path / "model", add))
    assert weights.unused() == ["model.layers.0.self_attn.q_proj.bias"]


def test_a_tied_head_that_is_stored_too_is_passed_over(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    spec, weights = open_spec(changed("qwen3", tmp_path / "model", add))
    assert spec.tied and weights.unused() == []


def test_gpt_oss_gate_and_up_are_taken_apart() -> None:
    stored = load_file(GOLDEN / "gpt_oss" / "model.safetensors")
    both = stored["model.layers.1.mlp.experts.gate_up_proj"][5]
    bias = stored["model.layers.1.mlp.experts.gate_up_proj_bias"][5]
    _, weights = open_spec(GOLDEN / "gpt_oss")
    np.testing.assert_array_equal(load(weights.tensor("experts.gate", 1, 5)), both[:, ::2].T)
    np.testing.assert_array_equal(load(weights.tensor("experts.up", 1, 5)), both[:, 1::2].T)
    np.testing.assert_array_equal(load(weights.tensor("experts.up.bias", 1, 5)), bias[1::2])


def test_kv_b_is_split_by_head() -> None:
    stored = load_file(GOLDEN / "deepseek_v3" / "model.safetensors")["model.layers.2.self_attn.kv_b_proj.weight"]
    _, weights = open_spec(GOLDEN / "deepseek_v3")
    k_b, v_b = load(weights.tensor("k_b", 2)), load(weights.tensor("v_b", 2))
    np.testing.assert_array_equal(k_b[3], stored[3 * 48 : 3 * 48 + 32].T)
    np.testing.assert_array_equal(v_b[3], stored[3 * 48 + 32 : 4 * 48])


def test_the_reference_notices_a_wrong_fact() -> None:
    """A tolerance that hid one slightly wrong factor would prove nothing."""
    fixture = Fixture(GOLDEN / "deepseek_v3", 0)
    spec, weights = open_spec(fixture.path)
    golden = load_golden(fixture)
    layers = tuple(
        replace(layer, ffn=replace(layer.ffn, router=replace(layer.ffn.router, scaling=2.4)))
        if isinstance(layer.ffn, MoE)
        else layer
        for layer in spec.layers
    )
    logits, _ = reference_forward(replace(spec, layers=layers), weights, golden["input_ids_0"])
    with pytest.raises(AssertionError, match="logits differ"):
        check_logits(logits, golden, 0, 2e-4)
