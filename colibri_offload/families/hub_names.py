"""Tensor names that most hub checkpoints share, as table fragments."""

from __future__ import annotations

from colibri_offload.families.spec import Entry, ModelSpec, MoE, Source

_LAYER = "model.layers.{layer}."

GLOBALS: dict[str, Entry] = {
    "embed": Source("model.embed_tokens.weight"),
    "head": Source("lm_head.weight"),
    "final_norm": Source("model.norm.weight"),
}

NORMS: dict[str, Entry] = {
    "input_norm": Source(_LAYER + "input_layernorm.weight"),
    "post_norm": Source(_LAYER + "post_attention_layernorm.weight"),
}

ATTENTION: dict[str, Entry] = {
    **{slot: Source(_LAYER + f"self_attn.{slot}_proj.weight") for slot in "qkvo"},
    **{f"{slot}.bias": Source(_LAYER + f"self_attn.{slot}_proj.bias") for slot in "qkvo"},
    "q_norm": Source(_LAYER + "self_attn.q_norm.weight"),
    "k_norm": Source(_LAYER + "self_attn.k_norm.weight"),
    "sinks": Source(_LAYER + "self_attn.sinks"),
}

DENSE: dict[str, Entry] = {slot: Source(_LAYER + f"mlp.{slot}_proj.weight") for slot in ("gate", "up", "down")}

ROUTER: dict[str, Entry] = {"router": Source(_LAYER + "mlp.gate.weight")}


def shared(name: str) -> dict[str, Entry]:
    """Shared experts at mlp.<name>."""
    return {f"shared.{slot}": Source(_LAYER + f"mlp.{name}.{slot}_proj.weight") for slot in ("gate", "up", "down")}


def routed_of(spec: ModelSpec) -> dict[str, Entry]:
    """Routed experts one by one, or merged as transformers 5 keeps them: gate over up [E, 2·I, H], down [E, H, I]."""
    widths = [layer.ffn.intermediate for layer in spec.layers if isinstance(layer.ffn, MoE)]
    if not widths:
        return {}
    merged = _LAYER + "mlp.experts."
    one = merged + "{expert}."
    return {
        "experts.gate": (Source(one + "gate_proj.weight"), Source(merged + "gate_up_proj", rows=(0, widths[0], None))),
        "experts.up": (Source(one + "up_proj.weight"), Source(merged + "gate_up_proj", rows=(widths[0], None, None))),
        "experts.down": (Source(one + "down_proj.weight"), Source(merged + "down_proj")),
    }
