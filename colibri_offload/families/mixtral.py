"""Mixtral. Source: Jiang et al. 2024, arXiv:2401.04088."""

from __future__ import annotations

from colibri_offload.families import hub_names as hub
from colibri_offload.families.config import Config
from colibri_offload.families.family import Family
from colibri_offload.families.gguf_names import gguf_table
from colibri_offload.families.llama import llama_gguf_keys
from colibri_offload.families.parts import attention, experts, layer_count, model_spec, norm, windowed
from colibri_offload.families.spec import Entry, Layer, ModelSpec, MoE, Router, Source, TensorTable

_MOE = "model.layers.{layer}.block_sparse_moe."

_EXPERTS: dict[str, Entry] = {
    "router": Source(_MOE + "gate.weight"),
    "experts.gate": Source(_MOE + "experts.{expert}.w1.weight"),
    "experts.up": Source(_MOE + "experts.{expert}.w3.weight"),
    "experts.down": Source(_MOE + "experts.{expert}.w2.weight"),
}


def mixtral_spec(config: Config) -> ModelSpec:
    """Every layer routes: softmax over all experts, the top-k renormalised; a sliding window where one is set."""
    mixer = attention(config, theta=1e6)
    ffn = MoE(
        experts=experts(config),
        top_k=config.integer("num_experts_per_tok", default=2),
        intermediate=config.integer("intermediate_size"),
        router=Router("softmax", renormalise=True),
    )
    sliding = config.get("sliding_window") is not None
    layers = [
        Layer(windowed(config, mixer, i, sliding), ffn, norm(config), norm(config)) for i in range(layer_count(config))
    ]
    return model_spec(config, "mixtral", layers)


MIXTRAL = Family(
    model_types=("mixtral",),
    spec=mixtral_spec,
    hub=lambda spec: TensorTable(hub.GLOBALS, hub.NORMS | hub.ATTENTION | _EXPERTS),
    gguf_arch="llama",
    gguf_match=lambda keys: bool(keys.get("expert_count")),
    gguf_keys=llama_gguf_keys,
    gguf=gguf_table,
)
