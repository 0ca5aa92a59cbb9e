"""One step through the model: the tokens of one or more sequences, and the buffers that all layers share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from colibri_offload.families.spec import Attention, LatentAttention, ModelSpec, MoE, Rope
from colibri_offload.graph.layout import pad
from colibri_offload.graph.memory import Region, Sequence
from colibri_offload.graph.ops import Rows, x_blocks
from colibri_offload.graph.source import ModelSource
from colibri_offload.jit.kernels.activations import FLOAT32, padded_tokens
from colibri_offload.jit.kernels.attention import PAGE


@dataclass(frozen=True)
class Part:
    """Consecutive new tokens of one sequence; `logits`: how many of the last ones need logits."""

    sequence: Sequence
    ids: np.ndarray
    logits: int = 1


def stride(columns: int) -> int:
    """Bytes between float rows of `columns` columns, padded to whole row groups."""
    return 4 * pad(columns, 16)


def ropes(spec: ModelSpec) -> list[Rope]:
    """The different rotations of a model."""
    return list(dict.fromkeys(layer.mixer.rope for layer in spec.layers if layer.mixer.rope is not None))


def workspace_sizes(source: ModelSource, tokens: int) -> dict[str, int]:
    """Bytes of every shared buffer for steps of up to `tokens` tokens. What `plan` prints is the sum."""
    spec, n = source.spec, padded_tokens(tokens) + 8
    h = spec.hidden
    token_nbytes = FLOAT32.token_nbytes  # the larger of the activation layouts

    def packed(columns: int, count: int = n) -> int:
        return count * x_blocks(columns) * token_nbytes

    sizes = {
        "ids": 4 * n,
        "positions": 4 * n,
        "pages": 8 * n,
        "tables": 8 * n,
        "index": 4 * n,
        "hidden": n * stride(h),
        "normed": n * stride(h),
        "x_float32": packed(h),
        "x_int8": packed(h),
        "x_guess": packed(h),
        "logits": LOGIT_ROWS * stride(spec.vocab),
        "final": packed(h, LOGIT_ROWS),
    }

    def need(name: str, nbytes: int) -> None:
        sizes[name] = max(sizes.get(name, 0), nbytes)

    for i, rope in enumerate(ropes(spec)):
        need(f"cos{i}", n * 2 * rope.dim)
        need(f"sin{i}", n * 2 * rope.dim)
    for layer in set(spec.layers):
        mixer, ffn = layer.mixer, layer.ffn
        if isinstance(mixer, Attention):
            need("q", n * stride(mixer.heads * mixer.head_dim))
            need("k", n * stride(mixer.kv_heads * mixer.head_dim))
            need("v", n * stride(mixer.kv_heads * mixer.head_dim))
            need("attended", n * stride(mixer.heads * mixer.head_dim))
            need("x_attended", packed(mixer.heads * mixer.head_dim))
        elif isinstance(mixer, LatentAttention):
            latent = mixer.kv_rank + mixer.rope_dim
            need("q_a", n * stride(mixer.q_rank or 1))
            need("x_q_a", packed(mixer.q_rank or 1))
            need("q", n * stride(mixer.heads * (mixer.nope_dim + mixer.rope_dim)))
            need("x_nope", packed(mixer.nope_dim, n * mixer.heads))
            need("q_latent", n * stride(mixer.heads * latent))
            need("kv_a", n * stride(latent))
            need("latent", n * stride(mixer.heads * mixer.kv_rank))
            need("x_latent", packed(mixer.kv_rank, n * mixer.heads))
            need("attended", n * stride(mixer.heads * mixer.v_dim))
            need("x_attended", packed(mixer.heads * mixer.v_dim))
        if isinstance(ffn, MoE):
            need("router_logits", n * stride(ffn.experts))
            need("guess_logits", n * stride(ffn.experts))
            need("topk_ids", 4 * n * ffn.top_k)
            need("topk_weights", 4 * n * ffn.top_k)
            if ffn.shared is not None:
                need("shared_gate", n * stride(1))
                need("shared_h", packed(ffn.shared.intermediate))
                need("shared_y", n * stride(h))
        pairs, width = pair_capacity(source, tokens, ffn), ffn.intermediate
        need("pair_index", 4 * pairs)
        need("pair_rows", 4 * pairs)
        need("pair_tiles", 8 * pairs)
        need("pair_x", packed(h, pairs))
        need("pair_h", packed(width, pairs))
        need("pair_y", (pairs + 1) * stride(h))
    return sizes


LOGIT_ROWS = 8


def pair_capacity(source: ModelSource, tokens: int, ffn: object) -> int:
    """(token, rank) pairs of a step, each expert's padded to whole tiles."""
    if not isinstance(ffn, MoE):
        return padded_tokens(tokens) + 8
    pairs = tokens * ffn.top_k
    return pairs + 8 * min(ffn.experts, pairs) + 8


class Step:
    """The tokens being computed, written where the kernels read them. n: number of tokens."""

    def __init__(self, source: ModelSource, workspace: Region, tokens: int):
        self.capacity, self.n = tokens, 0
        self.workspace = workspace
        self._ids = workspace.array("ids", (tokens,), np.int32)
        self._positions = workspace.array("positions", (tokens,), np.int32)
        self._pages = workspace.array("pages", (tokens,), np.uint64)
        self._tables = workspace.array("tables", (tokens,), np.uint64)
        self.index = workspace.array("index", (tokens,), np.int32)
        self._ropes = [
            (
                np.array(rope.inv_freq), rope.attention_factor,
                workspace.array(f"cos{i}", (tokens, rope.dim // 2), np.float32),
                workspace.array(f"sin{i}", (tokens, rope.dim // 2), np.float32),
            )
            for i, rope in enumerate(ropes(source.spec))
        ]  # fmt: skip
        h = source.spec.hidden
        self.hidden, self.normed = (Rows(workspace[name], stride(h)) for name in ("hidden", "normed"))
        self.logit_count = 0

    def fill(self, parts: list[Part]) -> None:
        """Take the new tokens of each part; their sequences get pages."""
        at = count = 0
        for part in parts:
            n, sequence = len(part.ids), part.sequence
            sequence.reserve(n)
            positions = np.arange(sequence.length, sequence.length + n)
            self._ids[at : at + n], self._positions[at : at + n] = part.ids, positions
            self._pages[at : at + n] = sequence.table[positions // PAGE]
            self._tables[at : at + n] = sequence.table.ctypes.data
            self.index[count : count + part.logits] = np.arange(at + n - part.logits, at + n)
            at, count = at + n, count + part.logits
        self.n, self.logit_count = at, count
        positions64 = self._positions[:at].astype(np.float64)
        for inv_freq, factor, cos, sin in self._ropes:
            angle = positions64[:, None] * inv_freq
            cos[:at], sin[:at] = np.cos(angle) * factor, np.sin(angle) * factor

    def advance(self, parts: list[Part]) -> None:
        """The tokens are in the KV cache now."""
        for part in parts:
            part.sequence.length += len(part.ids)
