"""Parts that most families share, read from hub configuration keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from colibri_offload.errors import CheckpointError
from colibri_offload.families.config import Config
from colibri_offload.families.rope import is_yarn, rope, scaling_section, stretch
from colibri_offload.families.spec import Attention, Layer, ModelSpec, Norm

# Beyond any model: a damaged count must not build millions of parts.
MAX_LAYERS = MAX_HEAD_DIM = 4096
MAX_EXPERTS = 1 << 16


def layer_count(config: Config) -> int:
    """num_hidden_layers."""
    return config.integer("num_hidden_layers", high=MAX_LAYERS)


def experts(config: Config) -> int:
    """The number of routed experts per layer under any of its names; 0 when the model is dense."""
    return config.integer("num_local_experts", "num_experts", "n_routed_experts", default=0, low=0, high=MAX_EXPERTS)


def norm(config: Config) -> Norm:
    """The RMSNorm of the residual stream."""
    return Norm(config.number("rms_norm_eps", 1e-6))


def attention(config: Config, *, theta: float = 10000.0, **facts: Any) -> Attention:
    """Grouped-query attention of the head counts and rope in `config`; `facts` are further fields of Attention."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{config.origin}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}; "
            "fetch the configuration again"
        )
    head_dim = config.integer("head_dim", default=max(1, config.integer("hidden_size") // heads), high=MAX_HEAD_DIM)
    rotary = config.integer("rotary_dim", default=head_dim, high=head_dim)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope(config, rotary, interleaved=config.flag("rope_interleave", False), theta=theta),
        **facts,
    )


def windowed(config: Config, base: Attention, layer: int, sliding: bool) -> Attention:
    """`base` with the sliding window when the configuration's layer_types, or else `sliding`, say so for this layer."""
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) < layer_count(config):
            raise CheckpointError(f"{config.origin}: layer_types misses layers; fetch the configuration again")
        kind = Config({"layer_types": kinds[layer]}, config.origin).choice(
            "layer_types", "", ("full_attention", "sliding_attention")
        )
        sliding = kind == "sliding_attention"
    return replace(base, window=config.integer("sliding_window")) if sliding else base


def token_ids(config: Config, key: str) -> tuple[int, ...]:
    """One id or a list of ids, without duplicates, in their order."""
    value = config.get(key, [])
    ids = Config({key: value if isinstance(value, list) else [value]}, config.origin).integers(key)
    return tuple(dict.fromkeys(ids))


def model_spec(config: Config, family: str, layers: Iterable[Layer], *, tied: bool = False) -> ModelSpec:
    """The whole model around `layers`. `tied` is the family's default for tie_word_embeddings."""
    config.choice("hidden_act", "silu", ("silu",))
    scaling = scaling_section(config)
    context = config.integer("max_position_embeddings", high=1 << 40)
    if is_yarn(scaling):
        # Some configurations state the extension without raising the context.
        original = scaling.number("original_max_position_embeddings", context)
        context = max(context, int(original * stretch(scaling)))
    bos = token_ids(config, "bos_token_id")
    ends = token_ids(config, "eos_token_id")
    generation = config.section("generation_config")
    if generation is not None:
        ends = tuple(dict.fromkeys(token_ids(generation, "eos_token_id") + ends))
    return ModelSpec(
        family=family,
        hidden=config.integer("hidden_size"),
        vocab=config.integer("vocab_size"),
        layers=tuple(layers),
        final_norm=norm(config),
        tied=config.flag("tie_word_embeddings", tied),
        max_context=context,
        bos_id=bos[0] if bos else None,
        eos_ids=ends,
    )
