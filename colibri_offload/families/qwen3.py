"""Qwen3, dense. Source: Qwen team 2025, arXiv:2505.09388."""

from __future__ import annotations

from colibri_offload.families import hub_names as hub
from colibri_offload.families.config import Config
from colibri_offload.families.family import Family
from colibri_offload.families.gguf_keys import GgufKeys
from colibri_offload.families.gguf_names import gguf_table
from colibri_offload.families.parts import attention, layer_count, model_spec, norm, windowed
from colibri_offload.families.spec import Attention, Dense, Layer, ModelSpec, TensorTable


def qwen3_attention(config: Config) -> Attention:
    """Each head of q and k is normalised before the rope."""
    bias = config.flag("attention_bias", False)
    return attention(config, qk_norm="head", qk_norm_eps=norm(config).eps, qkv_bias=bias, o_bias=bias)


def qwen_sliding(config: Config, layer: int) -> bool:
    """Qwen keeps its window switched off by a flag of its own; switched on, it starts at layer max_window_layers."""
    on = config.flag("use_sliding_window", False) and config.get("sliding_window") is not None
    return on and layer >= config.integer("max_window_layers", default=28, low=0)


def qwen3_spec(config: Config) -> ModelSpec:
    """Pre-norm attention with q/k norm, SwiGLU."""
    mixer, ffn = qwen3_attention(config), Dense(config.integer("intermediate_size"))
    layers = [
        Layer(windowed(config, mixer, i, qwen_sliding(config, i)), ffn, norm(config), norm(config))
        for i in range(layer_count(config))
    ]
    return model_spec(config, "qwen3", layers)


QWEN3 = Family(
    model_types=("qwen3",),
    spec=qwen3_spec,
    hub=lambda spec: TensorTable(hub.GLOBALS, hub.NORMS | hub.ATTENTION | hub.DENSE),
    gguf_arch="qwen3",
    gguf_keys=GgufKeys.common,
    gguf=gguf_table,
)
