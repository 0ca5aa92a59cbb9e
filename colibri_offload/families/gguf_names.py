"""Tensor names of GGUF files: one table serves every architecture, slots that a model lacks are never asked for.

Source: gguf-py's tensor mapping, https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
"""

from __future__ import annotations

from colibri_offload.families.spec import Entry, ModelSpec, Source, TensorTable

_BLOCK = "blk.{layer}."

_GLOBALS: dict[str, Entry] = {
    "embed": Source("token_embd.weight"),
    "head": Source("output.weight"),
    "final_norm": Source("output_norm.weight"),
}

_LAYER: dict[str, Entry] = {
    "input_norm": Source(_BLOCK + "attn_norm.weight"),
    "post_norm": (Source(_BLOCK + "ffn_norm.weight"), Source(_BLOCK + "post_attention_norm.weight")),
    "q": Source(_BLOCK + "attn_q.weight"),
    "k": Source(_BLOCK + "attn_k.weight"),
    "v": Source(_BLOCK + "attn_v.weight"),
    "o": Source(_BLOCK + "attn_output.weight"),
    "q.bias": Source(_BLOCK + "attn_q.bias"),
    "k.bias": Source(_BLOCK + "attn_k.bias"),
    "v.bias": Source(_BLOCK + "attn_v.bias"),
    "o.bias": Source(_BLOCK + "attn_output.bias"),
    "q_norm": Source(_BLOCK + "attn_q_norm.weight"),
    "k_norm": Source(_BLOCK + "attn_k_norm.weight"),
    "sinks": Source(_BLOCK + "attn_sinks.weight"),
    "router": Source(_BLOCK + "ffn_gate_inp.weight"),
    "router.bias": Source(_BLOCK + "ffn_gate_inp.bias"),
    "router.choice_bias": (Source(_BLOCK + "exp_probs_b.bias"), Source(_BLOCK + "exp_probs_b")),
    "shared_gate": Source(_BLOCK + "ffn_gate_inp_shexp.weight"),
}

for _part in ("gate", "up", "down"):
    _LAYER[_part] = Source(_BLOCK + f"ffn_{_part}.weight")
    _LAYER[f"shared.{_part}"] = Source(_BLOCK + f"ffn_{_part}_shexp.weight")
    # Files written before the experts were merged hold them one by one.
    _LAYER[f"experts.{_part}"] = (
        Source(_BLOCK + f"ffn_{_part}_exps.weight"),
        Source(_BLOCK + f"ffn_{_part}.{{expert}}.weight"),
    )
    _LAYER[f"experts.{_part}.bias"] = Source(_BLOCK + f"ffn_{_part}_exps.bias")


def gguf_table(spec: ModelSpec) -> TensorTable:
    """The table for `spec`'s GGUF."""
    return TensorTable(globals=_GLOBALS, layer=_LAYER)


def latent_gguf_table(spec: ModelSpec, kv_b: dict[str, Entry]) -> TensorTable:
    """The table of a model with latent attention; `kv_b` locates k_b and v_b in files that hold them as one tensor."""
    split = {
        "q_a": Source(_BLOCK + "attn_q_a.weight"),
        "q_a_norm": Source(_BLOCK + "attn_q_a_norm.weight"),
        "q_b": Source(_BLOCK + "attn_q_b.weight"),
        "kv_a": Source(_BLOCK + "attn_kv_a_mqa.weight"),
        "kv_a_norm": Source(_BLOCK + "attn_kv_a_norm.weight"),
    }
    return TensorTable(globals=_GLOBALS, layer={**_LAYER, **split, **kv_b})
