"""Writes a float hub fixture as a GGUF, in today's layout or an old one; names and keys are the `gguf` package's."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import MODEL_ARCH
from safetensors.numpy import load_file

ARCH = {
    "llama": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "olmoe": MODEL_ARCH.OLMOE,
    "deepseek_v2": MODEL_ARCH.DEEPSEEK2,
}


def to_gguf(
    model: Path, out: Path, *, merge: bool = True, split: bool = True, widths: bool = True, quantise: str = ""
) -> Path:
    """Old layouts: merge=False keeps experts one by one, split=False kv_b whole, widths=False omits their width.

    Tensors with `quantise` in their name, when given, become Q8_0.
    """
    config = json.loads((model / "config.json").read_text())
    arch = ARCH[config["model_type"]]
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[arch])
    _keys(writer, config, widths)
    tensors = load_file(model / "model.safetensors")
    if config["model_type"] in ("llama", "mixtral"):
        for name, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            for key in [k for k in tensors if name in k]:
                tensors[key] = permuted(tensors[key], config[heads])
    if config["model_type"] == "llama":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    if merge:
        _merge_experts(tensors)
    if split:
        _split_kv_b(tensors, config)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for key, value in tensors.items():
        name, value = _name(names, key), np.ascontiguousarray(value if value.shape[0] != 1 else value[0])
        if quantise and quantise in name:
            q8_0 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(value, q8_0), raw_dtype=q8_0)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + D/2 of each head come to lie side by side (llama.cpp's converter, LlamaModel.permute)."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def llama3_factors(config: dict) -> np.ndarray:
    """What llama3 scaling divides each frequency by, per pair, float32."""
    scaling, dim = config["rope_scaling"], config["head_dim"]
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (i / dim)
        share = scaling["original_max_position_embeddings"] / wavelength
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = min(max((share - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def _keys(writer: gguf.GGUFWriter, config: dict, widths: bool) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    experts = config.get("num_local_experts", config.get("num_experts", config.get("n_routed_experts")))
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if widths and "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("sliding_window") and config["model_type"] == "mixtral":
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "deepseek_v2":
        _latent_keys(writer, config)


def _latent_keys(writer: gguf.GGUFWriter, config: dict) -> None:
    scaling = config["rope_scaling"]
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["v_head_dim"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def _merge_experts(tensors: dict[str, np.ndarray]) -> None:
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for key in list(tensors):
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", key)
        if match:
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensors.pop(key)
    for key, stack in stacks.items():
        tensors[key] = np.stack([stack[i] for i in sorted(stack)])


def _split_kv_b(tensors: dict[str, np.ndarray], config: dict) -> None:
    for key in [k for k in tensors if "kv_b_proj" in k]:
        nope = config["qk_nope_head_dim"]
        both = tensors.pop(key).reshape(config["num_attention_heads"], nope + config["v_head_dim"], -1)
        tensors[key.replace("kv_b_proj", "k_b_proj")] = both[:, :nope].swapaxes(1, 2)
        tensors[key.replace("kv_b_proj", "v_b_proj")] = both[:, nope:]


def _name(names: gguf.TensorNameMap, key: str) -> str:
    single = re.fullmatch(r"model\.layers\.(\d+)\..*\.experts\.(\d+)\.(w1|w2|w3)\.weight", key)
    if single:
        part = {"w1": "gate", "w2": "down", "w3": "up"}[single[3]]
        return f"blk.{single[1]}.ffn_{part}.{single[2]}.weight"
    dense = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.weight", key)
    if dense:  # the package knows no dense layers in some MoE architectures
        return f"blk.{dense[1]}.ffn_{dense[2]}.weight"
    name = names.get_name(key, try_suffixes=(".weight", ".bias"))
    if name is None:
        raise KeyError(key)
    return name
