"""Qwen1.5-MoE and Qwen2-MoE. Source: Yang et al. 2024, arXiv:2407.10671, section 2.2.2."""

from __future__ import annotations

from colibri_offload.families import hub_names as hub
from colibri_offload.families.config import Config
from colibri_offload.families.family import Family
from colibri_offload.families.gguf_keys import GgufKeys
from colibri_offload.families.gguf_names import gguf_table
from colibri_offload.families.parts import attention, experts, layer_count, model_spec, norm, windowed
from colibri_offload.families.qwen3 import qwen_sliding
from colibri_offload.families.spec import (
    Dense,
    Entry,
    Layer,
    ModelSpec,
    MoE,
    Router,
    Shared,
    Source,
    TensorTable,
)

_SHARED_GATE: dict[str, Entry] = {"shared_gate": Source("model.layers.{layer}.mlp.shared_expert_gate.weight")}


def routes(config: Config, layer: int) -> bool:
    """Whether a layer has experts: every decoder_sparse_step-th one, unless mlp_only_layers names it."""
    step = config.integer("decoder_sparse_step", default=1)
    return layer not in config.integers("mlp_only_layers") and experts(config) > 0 and (layer + 1) % step == 0


def qwen2_moe_spec(config: Config) -> ModelSpec:
    """Softmax over all experts, the top-k as they are; one shared expert behind a sigmoid gate; biases on q, k, v."""
    mixer = attention(config, qkv_bias=config.flag("qkv_bias", True))
    layers = []
    for i in range(layer_count(config)):
        ffn: Dense | MoE
        if routes(config, i):
            ffn = MoE(
                experts=experts(config),
                top_k=config.integer("num_experts_per_tok", default=4),
                intermediate=config.integer("moe_intermediate_size"),
                router=Router("softmax", renormalise=config.flag("norm_topk_prob", False)),
                shared=Shared(config.integer("shared_expert_intermediate_size"), gated=True),
            )
        else:
            ffn = Dense(config.integer("intermediate_size"))
        layers.append(
            Layer(windowed(config, mixer, i, qwen_sliding(config, i)), ffn, norm(config), norm(config))
        )
    return model_spec(config, "qwen2_moe", layers)


def qwen2_moe_gguf_keys(keys: GgufKeys) -> dict[str, object]:
    """Older files lack the shared width; which layers are dense shows in the tensors alone."""
    shared = keys.get("expert_shared_feed_forward_length", keys.width("ffn_gate_shexp.weight", 0))
    return keys.common() | {"shared_expert_intermediate_size": shared, "mlp_only_layers": dense_layers(keys)}


def dense_layers(keys: GgufKeys) -> list[int]:
    """The layers without a router."""
    count = int(keys.get("block_count", 0))
    return [i for i in range(count) if f"blk.{i}.ffn_gate_inp.weight" not in keys.tensors]


QWEN2_MOE = Family(
    model_types=("qwen2_moe",),
    spec=qwen2_moe_spec,
    hub=lambda spec: TensorTable(
        hub.GLOBALS,
        hub.NORMS
        | hub.ATTENTION
        | hub.DENSE
        | hub.ROUTER
        | hub.shared("shared_expert")
        | _SHARED_GATE
        | hub.routed_of(spec),
    ),
    gguf_arch="qwen2moe",
    gguf_keys=qwen2_moe_gguf_keys,
    gguf=gguf_table,
)
