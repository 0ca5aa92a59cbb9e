"""What an architecture is, as data. A family turns a checkpoint's config into these; the graph builds blocks from them.

Axis letters used in all docstrings: T tokens, H hidden size, V vocabulary, N attention heads, G kv heads, D head dim,
E experts, K experts per token (top-k), I expert width (intermediate size), R latent rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Norm:
    """RMSNorm: x / sqrt(mean(x²) + eps) · (weight + weight_offset). Source: Zhang & Sennrich 2019, arXiv:1910.07467."""

    eps: float
    weight_offset: float = 0.0


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first `dim` elements of a head (len(inv_freq) == dim // 2); scaling is already applied.

    `interleaved`: pairs are (0,1), (2,3)…; otherwise (i, i + dim/2). `attention_factor` multiplies cos and sin (YaRN).
    Source: Su et al. 2021, arXiv:2104.09864; Peng et al. 2023 (YaRN), arXiv:2309.00071.
    """

    inv_freq: tuple[float, ...]
    interleaved: bool = False
    attention_factor: float = 1.0

    @property
    def dim(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention. q [N·D, H], k and v [G·D, H], o [H, N·D].

    `qk_norm`: "head" normalises each head before RoPE, "full" the whole projection before RoPE, None does nothing.
    `window`: a query sees itself and the window−1 keys before it.
    `sinks`: one logit per head in the softmax's denominator.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    qk_norm: Literal["head", "full"] | None = None
    qk_norm_eps: float = 0.0
    window: int | None = None
    sinks: bool = False
    qkv_bias: bool = False
    o_bias: bool = False


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA). Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.

    q: either q [N·(nope+rope), H], or q_a [q_rank, H] → RMSNorm(latent_norm) → q_b [N·(nope+rope), q_rank].
    kv_a [R+rope, H]: the first R elements → RMSNorm(latent_norm) → the latent c; the last `rope` are the shared key
    part k_pe. k_b [N, R, nope]: scores use q_nope·k_bᵀ against c (the absorbed form); v_b [N, v, R] maps attention
    over c to values.
    RoPE acts on q's last rope_dim elements of each head and on k_pe.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    rope: Rope
    latent_norm: Norm


@dataclass(frozen=True)
class Activation:
    """`silu`: silu(gate)·up.

    `swiglu_oai`: gate clamped above by limit, up both ways; (up+1)·gate·sigmoid(alpha·gate).
    """

    kind: Literal["silu", "swiglu_oai"] = "silu"
    alpha: float = 1.0
    limit: float = 0.0


@dataclass(frozen=True)
class Dense:
    """gate, up [I, H], down [H, I]."""

    intermediate: int
    activation: Activation = Activation()


@dataclass(frozen=True)
class Router:
    """How top_k experts and their weights come from router logits x·routerᵀ (+ bias).

    score: "softmax" or "sigmoid" over all E; "softmax_topk": the top-k of the logits, softmax over these k.
    choice_bias: a per-expert bias added to the scores for the choice only.
    groups > 1: experts are split in equal groups; the top_groups best stay in play. group_score "max" (masked scores
    become 0) or "top2_sum" of the biased scores (masked scores become −inf).
    renormalise: weights / (sum + denominator_eps); then × scaling. Ties go to the lower index.
    """

    score: Literal["softmax", "sigmoid", "softmax_topk"]
    renormalise: bool
    scaling: float = 1.0
    denominator_eps: float = 0.0
    bias: bool = False
    choice_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"


@dataclass(frozen=True)
class Shared:
    """Shared experts as one MLP of width `intermediate`; `gated`: × sigmoid(x·shared_gateᵀ)."""

    intermediate: int
    gated: bool = False


@dataclass(frozen=True)
class MoE:
    """Routed experts, each gate, up [I, H], down [H, I]; `bias`: every expert has gate, up and down biases."""

    experts: int
    top_k: int
    intermediate: int
    router: Router
    activation: Activation = Activation()
    shared: Shared | None = None
    bias: bool = False


@dataclass(frozen=True)
class Layer:
    """h = x + mixer(input_norm(x)); out = h + ffn(post_norm(h))."""

    mixer: Attention | LatentAttention
    ffn: Dense | MoE
    input_norm: Norm
    post_norm: Norm


@dataclass(frozen=True)
class ModelSpec:
    """A whole model. `tied`: the head is the embedding."""

    family: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    final_norm: Norm
    tied: bool
    max_context: int
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that route."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.ffn, MoE))


@dataclass(frozen=True)
class Source:
    """Where a slot's tensor lies in a checkpoint: a table entry, not code.

    `name` may hold {layer} and {expert}; with {expert} the experts are stored one by one. Without it, a slot of routed
    experts names a tensor whose first axis is the expert. Steps are applied in order to the tensor of one layer
    (and one expert): `transpose` for tensors stored [in, out], then `rows` = (start, stop, step) over output rows, then
    `heads` = (n, start, stop): view the rows as n equal heads and take rows start:stop of each → [n, stop−start, cols];
    then `swap`: transpose the last two axes.
    `blocks`: True matches only a tensor in a block format (MXFP4, Q4_0 …), False only one in a float format, None both:
    some checkpoints turn a tensor when they quantise it.
    """

    name: str
    transpose: bool = False
    rows: tuple[int | None, int | None, int | None] | None = None
    heads: tuple[int, int, int | None] | None = None
    swap: bool = False
    blocks: bool | None = None


# Slots. Global: embed, head, final_norm. Per layer (weights without suffix, biases as "<slot>.bias"):
#   input_norm, post_norm
#   Attention: q k v o, q_norm k_norm, sinks, and q.bias k.bias v.bias o.bias
#   LatentAttention: q | q_a q_a_norm q_b; kv_a kv_a_norm k_b v_b o
#   Dense: gate up down
#   MoE: router router.bias router.choice_bias; experts.gate experts.up experts.down (+ .bias);
#        shared.gate shared.up shared.down, shared_gate
GLOBAL_SLOTS = ("embed", "head", "final_norm")
EXPERT_SLOTS = (
    "experts.gate",
    "experts.up",
    "experts.down",
    "experts.gate.bias",
    "experts.up.bias",
    "experts.down.bias",
)


Entry = Source | tuple[Source, ...]


@dataclass(frozen=True)
class TensorTable:
    """Slot → Source, for the whole model and for each layer ("{layer}" is filled in).

    An entry of several sources lists the layouts in which checkpoints store the slot; the first one present is taken.
    Slots absent from a layer's blocks are ignored.
    """

    globals: dict[str, Entry] = field(default_factory=dict)
    layer: dict[str, Entry] = field(default_factory=dict)

    def sources(self, slot: str) -> tuple[Source, ...]:
        """The layouts of `slot`, preferred first; empty when the table does not know the slot."""
        entry = self.globals.get(slot) or self.layer.get(slot) or ()
        return (entry,) if isinstance(entry, Source) else entry
