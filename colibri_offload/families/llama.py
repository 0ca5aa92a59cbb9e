"""Llama 2 and 3, and models built like them. Source: Touvron et al. 2023, arXiv:2307.09288; arXiv:2407.21783."""

from __future__ import annotations

from colibri_offload.families import hub_names as hub
from colibri_offload.families.config import Config
from colibri_offload.families.family import Family
from colibri_offload.families.gguf_keys import GgufKeys
from colibri_offload.families.gguf_names import gguf_table
from colibri_offload.families.parts import attention, layer_count, model_spec, norm
from colibri_offload.families.spec import Dense, Layer, ModelSpec, TensorTable


def llama_spec(config: Config) -> ModelSpec:
    """Pre-norm attention with grouped queries, SwiGLU."""
    config.refuse("mlp_bias", False)
    bias = config.flag("attention_bias", False)
    mixer = attention(config, qkv_bias=bias, o_bias=bias)
    layer = Layer(mixer, Dense(config.integer("intermediate_size")), norm(config), norm(config))
    return model_spec(config, "llama", [layer] * layer_count(config))


def llama_gguf_keys(keys: GgufKeys) -> dict[str, object]:
    """GGUF's "llama" permutes the rows of q and k, so that pairs to be turned lie side by side."""
    # Biases have no key: their tensors say that they are there.
    bias = {"attention_bias": True} if "blk.0.attn_q.bias" in keys.tensors else {}
    return keys.common() | {"rope_interleave": True} | bias


LLAMA = Family(
    model_types=("llama",),
    spec=llama_spec,
    hub=lambda spec: TensorTable(hub.GLOBALS, hub.NORMS | hub.ATTENTION | hub.DENSE),
    gguf_arch="llama",
    gguf_match=lambda keys: not keys.get("expert_count"),
    gguf_keys=llama_gguf_keys,
    gguf=gguf_table,
)
