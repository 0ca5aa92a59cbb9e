"""A whole model in float64 NumPy, slow and plain: the oracle against which the engine is judged.

Written from the papers that spec.py names. It shares nothing with the engine but the spec and the checkpoint's bytes;
blocks are dequantised by the `gguf` package, those that no file has from their definitions. Latent attention is
computed the long way, keys and values written out.
"""

from __future__ import annotations

import gguf
import numpy as np

from colibri_offload.checkpoint.base import Tensor
from colibri_offload.families.spec import (
    Activation,
    Attention,
    Dense,
    LatentAttention,
    ModelSpec,
    MoE,
    Norm,
    Rope,
    Router,
)
from colibri_offload.families.weights import Weights

Routing = dict[int, tuple[np.ndarray, np.ndarray]]


def reference_forward(spec: ModelSpec, weights: Weights, ids: list[int] | np.ndarray) -> tuple[np.ndarray, Routing]:
    """logits [T, V] of a prompt, and {layer: (topk_ids [T, K], topk_weights [T, K])} in rank order."""
    routing: Routing = {}
    x = load(weights.tensor("embed"))[np.asarray(ids)]
    for n, layer in enumerate(spec.layers):
        w = LayerWeights(weights, n)
        normed = rms_norm(x, w["input_norm"], layer.input_norm)
        if isinstance(layer.mixer, Attention):
            x = x + grouped_attention(layer.mixer, w, normed)
        else:
            x = x + latent_attention(layer.mixer, w, normed)
        normed = rms_norm(x, w["post_norm"], layer.post_norm)
        if isinstance(layer.ffn, Dense):
            x = x + mlp(normed, w["gate"], w["up"], w["down"], layer.ffn.activation)
        else:
            y, routing[n] = mixture(layer.ffn, w, normed)
            x = x + y
    x = rms_norm(x, load(weights.tensor("final_norm")), spec.final_norm)
    head = weights.tensor("embed") if spec.tied else weights.tensor("head")
    return x @ load(head).T, routing


def load(tensor: Tensor) -> np.ndarray:
    """Values as float64, of the tensor's shape."""
    return dequantized(tensor.fmt, tensor.read()).reshape(tensor.shape)


def dequantized(fmt: str, rows: np.ndarray) -> np.ndarray:
    """float64 [..., columns] of rows uint8 [..., row_nbytes]."""
    if fmt in OWN_FORMATS:
        nbytes, values = OWN_FORMATS[fmt]
        return values(rows.reshape(-1, nbytes)).reshape(*rows.shape[:-1], -1)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[fmt]).astype(np.float64)


def _q4_z(blocks: np.ndarray) -> np.ndarray:
    """f16 d, u16 z, 16 bytes: low nibbles are columns 0–15, high ones 16–31; d·(q − z)."""
    d, z = blocks[:, :2].copy().view("<f2").astype(np.float64), blocks[:, 2:4].copy().view("<u2").astype(np.float64)
    return d * (np.concatenate([blocks[:, 4:] % 16, blocks[:, 4:] // 16], 1) - z)


def _int8(blocks: np.ndarray) -> np.ndarray:
    """f32 s, 128 signed bytes; s·q"""
    return blocks[:, :4].copy().view("<f4").astype(np.float64) * blocks[:, 4:].view(np.int8)


def _f8_e4m3(blocks: np.ndarray) -> np.ndarray:
    """f32 s, 128 bytes of sign, 4 bits of exponent (bias 7), 3 of mantissa."""
    code = blocks[:, 4:].astype(np.int64)
    exponent, mantissa = code // 8 % 16, code % 8
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    return blocks[:, :4].copy().view("<f4").astype(np.float64) * np.where(code < 128, value, -value)


OWN_FORMATS = {"Q4_Z": (20, _q4_z), "INT8": (132, _int8), "F8_E4M3": (132, _f8_e4m3)}


class LayerWeights:
    """One layer's slots by name."""

    def __init__(self, weights: Weights, layer: int) -> None:
        self._weights, self._layer = weights, layer

    def __getitem__(self, slot: str) -> np.ndarray:
        return load(self._weights.tensor(slot, self._layer))

    def expert(self, slot: str, expert: int) -> np.ndarray:
        return load(self._weights.tensor(slot, self._layer, expert))

    def bias(self, slot: str) -> np.ndarray | float:
        return self[slot] if self._weights.has(slot, self._layer) else 0.0


def rms_norm(x: np.ndarray, weight: np.ndarray, norm: Norm) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps) * (weight + norm.weight_offset)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rotate(x: np.ndarray, rope: Rope) -> np.ndarray:
    """x [T, heads, D]: token t's pairs turned by t·inv_freq, written as complex numbers."""
    angle = np.arange(len(x))[:, None] * np.array(rope.inv_freq)
    turn = (np.exp(1j * angle) * rope.attention_factor)[:, None]
    half, out = rope.dim // 2, x.copy()
    first = np.arange(0, rope.dim, 2) if rope.interleaved else np.arange(half)
    second = first + (1 if rope.interleaved else half)
    turned = (x[..., first] + 1j * x[..., second]) * turn
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, window: int | None, sinks: np.ndarray | None
) -> np.ndarray:
    """q, k [T, N, D], v [T, N, Dv] → [T, N·Dv], causal."""
    tokens, heads = q.shape[:2]
    age = np.arange(tokens)[:, None] - np.arange(tokens)
    seen = (age >= 0) & (age < (window or tokens))
    out = []
    for h in range(heads):
        scores = np.where(seen, q[:, h] @ k[:, h].T * scale, -np.inf)
        if sinks is not None:
            scores = np.concatenate([scores, np.full((tokens, 1), sinks[h])], -1)
        out.append(softmax(scores)[:, :tokens] @ v[:, h])
    return np.concatenate(out, -1)


def grouped_attention(a: Attention, w: LayerWeights, x: np.ndarray) -> np.ndarray:
    q, k, v = (x @ w[slot].T + w.bias(f"{slot}.bias") for slot in "qkv")
    if a.qk_norm == "full":
        q, k = rms_norm(q, w["q_norm"], Norm(a.qk_norm_eps)), rms_norm(k, w["k_norm"], Norm(a.qk_norm_eps))
    q, k, v = (y.reshape(len(x), -1, a.head_dim) for y in (q, k, v))
    if a.qk_norm == "head":
        q, k = rms_norm(q, w["q_norm"], Norm(a.qk_norm_eps)), rms_norm(k, w["k_norm"], Norm(a.qk_norm_eps))
    if a.rope is not None:
        q, k = rotate(q, a.rope), rotate(k, a.rope)
    k, v = (np.repeat(y, a.heads // a.kv_heads, axis=1) for y in (k, v))
    y = attend(q, k, v, a.scale, a.window, w["sinks"] if a.sinks else None)
    return y @ w["o"].T + w.bias("o.bias")


def latent_attention(a: LatentAttention, w: LayerWeights, x: np.ndarray) -> np.ndarray:
    q = x @ w["q"].T if a.q_rank is None else rms_norm(x @ w["q_a"].T, w["q_a_norm"], a.latent_norm) @ w["q_b"].T
    q = q.reshape(len(x), a.heads, a.nope_dim + a.rope_dim)
    q = np.concatenate([q[..., : a.nope_dim], rotate(q[..., a.nope_dim :], a.rope)], -1)
    kv = x @ w["kv_a"].T
    latent = rms_norm(kv[:, : a.kv_rank], w["kv_a_norm"], a.latent_norm)
    k_rope = rotate(kv[:, None, a.kv_rank :], a.rope).repeat(a.heads, axis=1)
    k_nope = np.einsum("tr,nrd->tnd", latent, w["k_b"])
    v = np.einsum("tr,nvr->tnv", latent, w["v_b"])
    return attend(q, np.concatenate([k_nope, k_rope], -1), v, a.scale, None, None) @ w["o"].T


def mlp(
    x: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    activation: Activation,
    biases: list[np.ndarray] | None = None,
) -> np.ndarray:
    g, u = x @ gate.T, x @ up.T
    if biases is not None:
        g, u = g + biases[0], u + biases[1]
    if activation.kind == "silu":
        h = g * sigmoid(g) * u
    else:
        g, u = np.minimum(g, activation.limit), np.clip(u, -activation.limit, activation.limit)
        h = (u + 1) * g * sigmoid(activation.alpha * g)
    y = h @ down.T
    return y if biases is None else y + biases[2]


def mixture(m: MoE, w: LayerWeights, x: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    logits = x @ w["router"].T + (w["router.bias"] if m.router.bias else 0.0)
    choice_bias = w["router.choice_bias"] if m.router.choice_bias else np.zeros(m.experts)
    routes = [route(m.router, m.top_k, row, choice_bias) for row in logits]
    y = np.zeros_like(x)
    for e in range(m.experts):
        mine = [(t, ids.index(e)) for t, (ids, _) in enumerate(routes) if e in ids]
        if not mine:
            continue
        gate, up, down = (w.expert(f"experts.{part}", e) for part in ("gate", "up", "down"))
        biases = [w.expert(f"experts.{part}.bias", e) for part in ("gate", "up", "down")] if m.bias else None
        for t, rank in mine:
            y[t] += routes[t][1][rank] * mlp(x[t], gate, up, down, m.activation, biases)
    if m.shared is not None:
        shared = mlp(x, w["shared.gate"], w["shared.up"], w["shared.down"], m.activation)
        y += shared * sigmoid(x @ w["shared_gate"].T) if m.shared.gated else shared
    return y, (np.array([ids for ids, _ in routes]), np.array([weights for _, weights in routes]))


def route(r: Router, top_k: int, logits: np.ndarray, choice_bias: np.ndarray) -> tuple[list[int], np.ndarray]:
    """One token's experts, best first, and the factors of their outputs."""
    if r.score == "softmax_topk":
        ids = best(logits, top_k)
        return ids, softmax(logits[ids])
    scores = softmax(logits) if r.score == "softmax" else sigmoid(logits)
    choice = scores + choice_bias
    if r.groups > 1:
        members = choice.reshape(r.groups, -1)
        rank = members.max(-1) if r.group_score == "max" else np.sort(members, -1)[:, -2:].sum(-1)
        kept = best(rank, r.top_groups)
        masked = np.full_like(members, 0.0 if r.group_score == "max" else -np.inf)
        masked[kept] = members[kept]
        choice = masked.reshape(-1)
    ids = best(choice, top_k)
    weights = scores[ids]
    if r.renormalise:
        weights = weights / (weights.sum() + r.denominator_eps)
    return ids, weights * r.scaling


def best(values: np.ndarray, count: int) -> list[int]:
    """Indices of the largest values, largest first; the lower index wins a tie."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
