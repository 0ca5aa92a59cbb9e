"""What DeepSeek's generations share: latent attention, the layout of its tensors and of its GGUF keys."""

from __future__ import annotations

from colibri_offload.errors import CheckpointError
from colibri_offload.families import hub_names as hub
from colibri_offload.families.config import Config
from colibri_offload.families.gguf_keys import GgufKeys
from colibri_offload.families.gguf_names import latent_gguf_table
from colibri_offload.families.parts import MAX_HEAD_DIM, experts, layer_count, model_spec, norm
from colibri_offload.families.rope import is_yarn, rope, scaling_section, stretch, yarn_mscale
from colibri_offload.families.spec import (
    Dense,
    Entry,
    LatentAttention,
    Layer,
    ModelSpec,
    MoE,
    Norm,
    Router,
    Shared,
    Source,
    TensorTable,
)

_ATTN = "model.layers.{layer}.self_attn."

# The reference code builds these norms with its class default, whatever rms_norm_eps says.
_LATENT_NORM = Norm(1e-6)


def latent_attention(config: Config) -> LatentAttention:
    """MLA; YaRN's mscale_all_dim enters the softmax scale squared. Source: DeepSeek-V2, arXiv:2405.04434."""
    config.refuse("attention_bias", False)
    nope, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim", high=MAX_HEAD_DIM)
    scale = (nope + rope_dim) ** -0.5
    scaling = scaling_section(config)
    if is_yarn(scaling):
        scale *= yarn_mscale(stretch(scaling), scaling.number("mscale_all_dim", 0, low=0)) ** 2
    return LatentAttention(
        heads=config.integer("num_attention_heads"),
        q_rank=None if config.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope_dim,
        v_dim=config.integer("v_head_dim"),
        scale=scale,
        rope=rope(config, rope_dim, interleaved=config.flag("rope_interleave", True)),
        latent_norm=_LATENT_NORM,
    )


def deepseek_spec(config: Config, family: str, router: Router) -> ModelSpec:
    """Dense layers first, then layers with routed and plainly added shared experts."""
    mixer = latent_attention(config)
    width, shared = config.integer("moe_intermediate_size"), config.integer("n_shared_experts", default=0, low=0)
    moe = MoE(
        experts=experts(config),
        top_k=config.integer("num_experts_per_tok"),
        intermediate=width,
        router=router,
        shared=Shared(shared * width) if shared else None,
    )
    dense = Dense(config.integer("intermediate_size"))
    first, step = config.integer("first_k_dense_replace", default=0, low=0), config.integer("moe_layer_freq", default=1)
    layers = [
        Layer(mixer, moe if i >= first and i % step == 0 else dense, norm(config), norm(config))
        for i in range(layer_count(config))
    ]
    return model_spec(config, family, layers)


def _kv_b(spec: ModelSpec, name: str) -> tuple[Source, Source]:
    """k_b and v_b inside one tensor [N·(nope+v), R]."""
    mixer = spec.layers[0].mixer
    if not isinstance(mixer, LatentAttention):
        raise TypeError(f"{spec.family} has no latent attention")
    k = Source(name, heads=(mixer.heads, 0, mixer.nope_dim), swap=True)
    return k, Source(name, heads=(mixer.heads, mixer.nope_dim, None))


def deepseek_hub(spec: ModelSpec) -> TensorTable:
    """Hub names of both generations."""
    k_b, v_b = _kv_b(spec, _ATTN + "kv_b_proj.weight")
    attention: dict[str, Entry] = {
        "q": Source(_ATTN + "q_proj.weight"),
        "q_a": Source(_ATTN + "q_a_proj.weight"),
        "q_a_norm": Source(_ATTN + "q_a_layernorm.weight"),
        "q_b": Source(_ATTN + "q_b_proj.weight"),
        "kv_a": Source(_ATTN + "kv_a_proj_with_mqa.weight"),
        "kv_a_norm": Source(_ATTN + "kv_a_layernorm.weight"),
        "k_b": k_b,
        "v_b": v_b,
        "o": Source(_ATTN + "o_proj.weight"),
    }
    choice: dict[str, Entry] = {
        "router.choice_bias": Source("model.layers.{layer}.mlp.gate.e_score_correction_bias")
    }
    layer = hub.NORMS | attention | hub.DENSE | hub.ROUTER | choice | hub.shared("shared_experts")
    return TensorTable(hub.GLOBALS, layer | hub.routed_of(spec))


def deepseek_gguf(spec: ModelSpec) -> TensorTable:
    """GGUF names; k_b and v_b are split in newer files and one tensor in older ones."""
    k_b, v_b = _kv_b(spec, "blk.{layer}.attn_kv_b.weight")
    return latent_gguf_table(
        spec,
        {
            "k_b": (Source("blk.{layer}.attn_k_b.weight"), k_b),
            "v_b": (Source("blk.{layer}.attn_v_b.weight"), v_b),
        },
    )


def deepseek_gguf_keys(keys: GgufKeys) -> dict[str, object]:
    """Newer files describe the absorbed form in key_length and put the head's own sizes under *_mla."""
    rope_dim = keys.get("rope.dimension_count")
    key = keys.get("attention.key_length_mla", keys.get("attention.key_length"))
    if not isinstance(rope_dim, int) or not isinstance(key, int):
        missing = "rope.dimension_count" if rope_dim is None else "attention.key_length"
        raise CheckpointError(f"{keys.origin}: {keys.arch}.{missing} is missing; download the file again")
    return keys.common() | {
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "kv_lora_rank": keys.get("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key - rope_dim,
        "v_head_dim": keys.get("attention.value_length_mla", keys.get("attention.value_length")),
        "first_k_dense_replace": keys.get("leading_dense_block_count"),
        "n_shared_experts": keys.get("expert_shared_count"),
        "n_group": keys.get("expert_group_count"),
        "topk_group": keys.get("expert_group_used_count"),
        "routed_scaling_factor": keys.get("expert_weights_scale"),
        "topk_method": "noaux_tc" if _has_choice_bias(keys) else "group_limited_greedy",
    }


def _has_choice_bias(keys: GgufKeys) -> bool:
    return keys.width("exp_probs_b.bias", 0) is not None or keys.width("exp_probs_b", 0) is not None


def sigmoid_gated(keys: GgufKeys) -> bool:
    """Whether a deepseek2 file routes by sigmoid (third generation): key expert_gating_func, 1 softmax, 2 sigmoid."""
    return keys.get("expert_gating_func", 1) == 2
