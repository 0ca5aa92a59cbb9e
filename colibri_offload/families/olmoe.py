"""OLMoE. Source: Muennighoff et al. 2024, arXiv:2409.02060."""

from __future__ import annotations

from colibri_offload.families import hub_names as hub
from colibri_offload.families.config import Config
from colibri_offload.families.family import Family
from colibri_offload.families.gguf_keys import GgufKeys
from colibri_offload.families.gguf_names import gguf_table
from colibri_offload.families.parts import attention, experts, layer_count, model_spec, norm
from colibri_offload.families.spec import Layer, ModelSpec, MoE, Router, TensorTable


def olmoe_spec(config: Config) -> ModelSpec:
    """q and k are normalised as whole projections; softmax over all experts, not renormalised by default."""
    config.refuse("clip_qkv", None)
    bias = config.flag("attention_bias", False)
    mixer = attention(config, qk_norm="full", qk_norm_eps=norm(config).eps, qkv_bias=bias, o_bias=bias)
    ffn = MoE(
        experts=experts(config),
        top_k=config.integer("num_experts_per_tok", default=8),
        intermediate=config.integer("intermediate_size"),
        router=Router("softmax", renormalise=config.flag("norm_topk_prob", False)),
    )
    layer = Layer(mixer, ffn, norm(config), norm(config))
    return model_spec(config, "olmoe", [layer] * layer_count(config))


def olmoe_gguf_keys(keys: GgufKeys) -> dict[str, object]:
    """The clipping of q, k and v has a key of its own."""
    return keys.common() | {"clip_qkv": keys.get("attention.clamp_kqv")}


OLMOE = Family(
    model_types=("olmoe",),
    spec=olmoe_spec,
    hub=lambda spec: TensorTable(hub.GLOBALS, hub.NORMS | hub.ATTENTION | hub.ROUTER | hub.routed_of(spec)),
    gguf_arch="olmoe",
    gguf_keys=olmoe_gguf_keys,
    gguf=gguf_table,
)
