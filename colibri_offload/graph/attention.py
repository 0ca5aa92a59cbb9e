"""Mixers: grouped-query attention and multi-head latent attention, as operations of a layer's program."""

from __future__ import annotations

from colibri_offload.errors import UnsupportedError
from colibri_offload.families.spec import Attention, LatentAttention, Norm, Rope
from colibri_offload.graph.context import Context
from colibri_offload.graph.ops import Builder, Packed, Rows, x_blocks
from colibri_offload.jit.kernels.attention import Attend, StoreKv
from colibri_offload.jit.kernels.attention import Rope as RopeArgs

MAX_QUERIES = 8  # query heads of one task that share a pass over the keys


def queries_per_task(heads: int, kv_heads: int) -> int:
    """The largest divisor ≤ 8 of the number of query heads per kv head."""
    group = heads // kv_heads
    return max(n for n in range(1, MAX_QUERIES + 1) if group % n == 0)


def kv_dims(mixer: Attention | LatentAttention) -> tuple[int, int, int]:
    """(kv heads, key dim, value dim) in the cache. MLA keeps the latent and the shared rotated key part."""
    if isinstance(mixer, Attention):
        return mixer.kv_heads, mixer.head_dim, mixer.head_dim
    return 1, mixer.kv_rank + mixer.rope_dim, mixer.kv_rank


def _rotate(
    c: Context, b: Builder, all_ropes: list[Rope], rope: Rope | None, src: Rows, dst: Rows, *, heads: int, dim: int,
    src_head: int, dst_head: int, weight: int = 0, eps: float = 0.0,
) -> None:  # fmt: skip
    """Norm per head (when `weight`) and RoPE, from src to dst; head strides in elements."""
    pairs, interleaved, cos, sin = 0, False, 0, 0
    if rope is not None:
        i = all_ropes.index(rope)
        pairs, interleaved = rope.dim // 2, rope.interleaved
        cos, sin = c.workspace[f"cos{i}"], c.workspace[f"sin{i}"]
    b.add(
        c.kernels.rope(dim, pairs, interleaved), RopeArgs, lambda n: n * heads,
        src=src.address, dst=dst.address, weight=weight, cos=cos, sin=sin, src_stride=src.stride, dst_stride=dst.stride,
        src_head=4 * src_head, dst_head=4 * dst_head, heads=heads, eps=eps,
    )  # fmt: skip


def _cache_and_attend(
    c: Context, b: Builder, layer: int, mixer: Attention | LatentAttention, q: Rows, key: Rows, value: Rows, out: Rows
) -> None:
    kv_heads, key_dim, value_dim = kv_dims(mixer)
    queries = queries_per_task(mixer.heads, kv_heads)
    chunks = mixer.heads // kv_heads // queries
    window = (mixer.window or 0) if isinstance(mixer, Attention) else 0
    ws = c.workspace
    b.stage()
    b.add(
        c.kernels.store_kv(key_dim, value_dim, c.kv_type), StoreKv, lambda n: n * kv_heads,
        key=key.address, value=value.address, pages=ws["pages"], positions=ws["positions"], key_stride=key.stride,
        value_stride=value.stride, layer_at=c.kv_at[layer], kv_heads=kv_heads,
    )  # fmt: skip
    b.stage()
    b.add(
        c.kernels.attend(key_dim, value_dim, queries, c.kv_type), Attend, lambda n: n * kv_heads * chunks,
        q=q.address, out=out.address, tables=ws["tables"], positions=ws["positions"],
        sinks=c.resident.vector("sinks", layer), q_stride=q.stride, out_stride=out.stride, layer_at=c.kv_at[layer],
        kv_heads=kv_heads, chunks=chunks, window=window, scale=mixer.scale,
    )  # fmt: skip


def _project_out(c: Context, b: Builder, layer: int, attended: Rows, columns: int) -> None:
    o = c.resident.matrix("o", layer)
    b.stage()
    x = c.pack_for(b, [o], attended, "x_attended", columns)
    b.stage()
    b.matmul(o, x[c.act(o).name], c.step.hidden, bias=c.resident.vector("o.bias", layer), accumulate=True)


def build_attention(
    c: Context, b: Builder, layer: int, mixer: Attention, norm: Norm, hidden: int, all_ropes: list[Rope]
) -> None:
    """hidden += o(attend(rope(q), rope(k), v)), q, k, v from input_norm(hidden)."""
    r = c.resident
    q_dim, kv_dim = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    q, k, v = c.rows("q", q_dim), c.rows("k", kv_dim), c.rows("v", kv_dim)
    matrices = {name: r.matrix(name, layer) for name in ("q", "k", "v")}
    b.stage()
    x = c.pack_for(
        b, list(matrices.values()), c.step.hidden, "x", hidden, weight=r.vector("input_norm", layer), eps=norm.eps
    )
    b.stage()
    for name, rows in (("q", q), ("k", k), ("v", v)):
        m = matrices[name]
        b.matmul(m, x[c.act(m).name], rows, bias=r.vector(f"{name}.bias", layer))
    if mixer.qk_norm == "full":
        b.stage()
        for name, rows, columns in (("q_norm", q, q_dim), ("k_norm", k, kv_dim)):
            b.pack(rows, None, columns=columns, weight=r.vector(name, layer), eps=mixer.qk_norm_eps, rows_out=rows)
    if mixer.rope is not None or mixer.qk_norm == "head":
        b.stage()
        for name, rows, heads in (("q_norm", q, mixer.heads), ("k_norm", k, mixer.kv_heads)):
            weight = r.vector(name, layer) if mixer.qk_norm == "head" else 0
            _rotate(
                c, b, all_ropes, mixer.rope, rows, rows, heads=heads, dim=mixer.head_dim, src_head=mixer.head_dim,
                dst_head=mixer.head_dim, weight=weight, eps=mixer.qk_norm_eps,
            )  # fmt: skip
    attended = c.rows("attended", q_dim)
    _cache_and_attend(c, b, layer, mixer, q, k, v, attended)
    _project_out(c, b, layer, attended, q_dim)


def build_latent_attention(
    c: Context, b: Builder, layer: int, mixer: LatentAttention, norm: Norm, hidden: int, all_ropes: list[Rope]
) -> None:
    """MLA in its absorbed form, in prefill and decode alike: attention over the latents, one shared key head.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.2 and appendix C.
    """
    if mixer.kv_rank % 16 or mixer.v_dim % 16:
        raise UnsupportedError(
            f"MLA with kv rank {mixer.kv_rank} and value dim {mixer.v_dim}: both must be multiples of 16"
        )
    r, rank, nope, rope_dim = c.resident, mixer.kv_rank, mixer.nope_dim, mixer.rope_dim
    latent, q_head, q_dim = rank + rope_dim, nope + rope_dim, mixer.heads * (nope + rope_dim)
    q, kv_a = c.rows("q", q_dim), c.rows("kv_a", latent)
    kv_matrix, k_b, v_b = (r.matrix(name, layer) for name in ("kv_a", "k_b", "v_b"))
    first = r.matrix("q" if mixer.q_rank is None else "q_a", layer)
    q_a = c.rows("q_a", mixer.q_rank or 1)
    b.stage()
    x = c.pack_for(
        b, [first, kv_matrix], c.step.hidden, "x", hidden, weight=r.vector("input_norm", layer), eps=norm.eps
    )
    b.stage()
    b.matmul(first, x[c.act(first).name], q if mixer.q_rank is None else q_a)
    b.matmul(kv_matrix, x[c.act(kv_matrix).name], kv_a)
    eps = mixer.latent_norm.eps
    b.stage()
    b.pack(kv_a, None, columns=rank, weight=r.vector("kv_a_norm", layer), eps=eps, rows_out=kv_a)
    pe = kv_a.at(rank)
    _rotate(c, b, all_ropes, mixer.rope, pe, pe, heads=1, dim=rope_dim, src_head=rope_dim, dst_head=rope_dim)
    if mixer.q_rank is not None:
        q_b = r.matrix("q_b", layer)
        x_q = c.pack_for(b, [q_b], q_a, "x_q_a", mixer.q_rank, weight=r.vector("q_a_norm", layer), eps=eps)
        b.stage()
        b.matmul(q_b, x_q[c.act(q_b).name], q)
    # q_nope of each head through its k_b into the latent space; then the rotated part behind it
    act = c.act(k_b)
    step_nbytes = act.token_nbytes * (c.step.capacity + 8)
    x_nope = Packed(c.workspace["x_nope"], act, nope, step_nbytes * x_blocks(nope))
    b.stage()
    b.pack(q, x_nope, columns=nope, batches=mixer.heads, src_batch=4 * q_head)
    q_latent = c.rows("q_latent", mixer.heads * latent)
    b.stage()
    b.matmul(k_b, x_nope, q_latent, y_batch=4 * latent)
    b.stage()
    _rotate(
        c, b, all_ropes, mixer.rope, q.at(nope), q_latent.at(rank), heads=mixer.heads, dim=rope_dim, src_head=q_head,
        dst_head=latent,
    )  # fmt: skip
    attended_latent = c.rows("latent", mixer.heads * rank)
    _cache_and_attend(c, b, layer, mixer, q_latent, kv_a, kv_a, attended_latent)
    act = c.act(v_b)
    step_nbytes = act.token_nbytes * (c.step.capacity + 8)
    x_latent = Packed(c.workspace["x_latent"], act, rank, step_nbytes * x_blocks(rank))
    attended = c.rows("attended", mixer.heads * mixer.v_dim)
    b.stage()
    b.pack(attended_latent, x_latent, columns=rank, batches=mixer.heads, src_batch=4 * rank)
    b.stage()
    b.matmul(v_b, x_latent, attended, y_batch=4 * mixer.v_dim)
    _project_out(c, b, layer, attended, mixer.heads * mixer.v_dim)
