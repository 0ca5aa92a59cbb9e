"""Qwen3-MoE. Source: Qwen team 2025, arXiv:2505.09388."""

from __future__ import annotations

from colibri_offload.families import hub_names as hub
from colibri_offload.families.config import Config
from colibri_offload.families.family import Family
from colibri_offload.families.gguf_keys import GgufKeys
from colibri_offload.families.gguf_names import gguf_table
from colibri_offload.families.parts import experts, layer_count, model_spec, norm, windowed
from colibri_offload.families.qwen2_moe import dense_layers, routes
from colibri_offload.families.qwen3 import qwen3_attention
from colibri_offload.families.spec import Dense, Layer, ModelSpec, MoE, Router, TensorTable


def qwen3_moe_spec(config: Config) -> ModelSpec:
    """Qwen3's attention; softmax over all experts, the top-k renormalised where norm_topk_prob says so."""
    mixer = qwen3_attention(config)
    # Unlike the dense model, a window that is switched on holds for every layer.
    sliding = config.flag("use_sliding_window", False) and config.get("sliding_window") is not None
    layers = []
    for i in range(layer_count(config)):
        ffn: Dense | MoE
        if routes(config, i):
            ffn = MoE(
                experts=experts(config),
                top_k=config.integer("num_experts_per_tok", default=8),
                intermediate=config.integer("moe_intermediate_size"),
                router=Router("softmax", renormalise=config.flag("norm_topk_prob", False)),
            )
        else:
            ffn = Dense(config.integer("intermediate_size"))
        layers.append(Layer(windowed(config, mixer, i, sliding), ffn, norm(config), norm(config)))
    return model_spec(config, "qwen3_moe", layers)


def qwen3_moe_gguf_keys(keys: GgufKeys) -> dict[str, object]:
    """Files hold no flag for the renormalisation: all released models do it."""
    return {"norm_topk_prob": True} | keys.common() | {"mlp_only_layers": dense_layers(keys)}


QWEN3_MOE = Family(
    model_types=("qwen3_moe",),
    spec=qwen3_moe_spec,
    hub=lambda spec: TensorTable(
        hub.GLOBALS, hub.NORMS | hub.ATTENTION | hub.DENSE | hub.ROUTER | hub.routed_of(spec)
    ),
    gguf_arch="qwen3moe",
    gguf_keys=qwen3_moe_gguf_keys,
    gguf=gguf_table,
)
