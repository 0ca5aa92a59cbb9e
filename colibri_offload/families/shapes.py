"""The slots that a spec asks for and their shapes: where the graph's needs meet a checkpoint's tensors."""

from __future__ import annotations

from colibri_offload.families.spec import Attention, Dense, LatentAttention, Layer, ModelSpec, MoE

Shapes = dict[str, tuple[int, ...]]


def global_shapes(spec: ModelSpec) -> Shapes:
    """embed, final_norm, and head unless it is the embedding."""
    shapes: Shapes = {"embed": (spec.vocab, spec.hidden), "final_norm": (spec.hidden,)}
    return shapes if spec.tied else shapes | {"head": (spec.vocab, spec.hidden)}


def layer_shapes(layer: Layer, hidden: int) -> Shapes:
    """All slots of a layer; the shape of an EXPERT_SLOT is that of one expert."""
    norms: Shapes = {"input_norm": (hidden,), "post_norm": (hidden,)}
    mixer, ffn = layer.mixer, layer.ffn
    mixing = _attention(mixer, hidden) if isinstance(mixer, Attention) else _latent(mixer, hidden)
    return norms | mixing | (_gated("", ffn.intermediate, hidden) if isinstance(ffn, Dense) else _moe(ffn, hidden))


def _attention(a: Attention, hidden: int) -> Shapes:
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    shapes: Shapes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    if a.qkv_bias:
        shapes |= {"q.bias": (q,), "k.bias": (kv,), "v.bias": (kv,)}
    if a.o_bias:
        shapes |= {"o.bias": (hidden,)}
    if a.qk_norm == "head":
        shapes |= {"q_norm": (a.head_dim,), "k_norm": (a.head_dim,)}
    if a.qk_norm == "full":
        shapes |= {"q_norm": (q,), "k_norm": (kv,)}
    if a.sinks:
        shapes |= {"sinks": (a.heads,)}
    return shapes


def _latent(a: LatentAttention, hidden: int) -> Shapes:
    q = a.heads * (a.nope_dim + a.rope_dim)
    shapes: Shapes = {
        "kv_a": (a.kv_rank + a.rope_dim, hidden),
        "kv_a_norm": (a.kv_rank,),
        "k_b": (a.heads, a.kv_rank, a.nope_dim),
        "v_b": (a.heads, a.v_dim, a.kv_rank),
        "o": (hidden, a.heads * a.v_dim),
    }
    if a.q_rank is None:
        return shapes | {"q": (q, hidden)}
    return shapes | {"q_a": (a.q_rank, hidden), "q_a_norm": (a.q_rank,), "q_b": (q, a.q_rank)}


def _moe(m: MoE, hidden: int) -> Shapes:
    shapes: Shapes = {"router": (m.experts, hidden)} | _gated("experts.", m.intermediate, hidden)
    if m.router.bias:
        shapes |= {"router.bias": (m.experts,)}
    if m.router.choice_bias:
        shapes |= {"router.choice_bias": (m.experts,)}
    if m.bias:
        shapes |= {
            "experts.gate.bias": (m.intermediate,),
            "experts.up.bias": (m.intermediate,),
            "experts.down.bias": (hidden,),
        }
    if m.shared is not None:
        shapes |= _gated("shared.", m.shared.intermediate, hidden)
        if m.shared.gated:
            shapes |= {"shared_gate": (1, hidden)}
    return shapes


def _gated(prefix: str, width: int, hidden: int) -> Shapes:
    return {prefix + "gate": (width, hidden), prefix + "up": (width, hidden), prefix + "down": (hidden, width)}
