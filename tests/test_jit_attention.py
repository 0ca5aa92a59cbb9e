"""RoPE, the paged KV cache and attention over it, against float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from jit_util import aligned, error, floats, intact, kernels, run

from colibri_offload.jit.kernels.attention import PAGE, TILE, Attend, Rope, StoreKv, kv_page_nbytes

KV_DTYPES = {"f32": np.float32, "f16": np.float16}


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ---- RoPE
def rotate(
    x: np.ndarray, pairs: int, interleaved: bool, *, weight: np.ndarray | None = None, norm_only: bool = False,
    in_place: bool = False,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(the kernel's result, the one in float64) for x [tokens, heads, dim]."""
    tokens, heads, dim = x.shape
    eps = 1e-5
    angle = np.random.default_rng(1).uniform(-3, 3, (tokens, pairs))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    want = x.astype(np.float64)
    if weight is not None:
        want = want / np.sqrt((want**2).mean(-1, keepdims=True) + np.float32(eps)) * weight
    if not norm_only:
        first = np.arange(pairs) * 2 if interleaved else np.arange(pairs)
        second = first + (1 if interleaved else pairs)
        p, q = want[..., first].copy(), want[..., second].copy()
        want[..., first] = p * cos[:, None] - q * sin[:, None]
        want[..., second] = q * cos[:, None] + p * sin[:, None]
    src = x.copy()
    dst = src if in_place else floats(tokens, heads, dim + 4, fill=7.0)
    run(
        kernels().rope(dim, 0 if norm_only else pairs, interleaved), Rope, tokens * heads, src=src, dst=dst,
        weight=0 if weight is None else weight, cos=cos, sin=sin, src_stride=src.strides[0], src_head=src.strides[1],
        dst_stride=dst.strides[0], dst_head=dst.strides[1], heads=heads, eps=eps,
    )  # fmt: skip
    if not in_place:
        assert (dst[..., dim:] == 7.0).all() and intact(dst)
    return dst[..., :dim], want


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "pairs"), [(64, 32), (32, 8), (80, 24), (24, 12), (128, 64)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope(dim: int, pairs: int, interleaved: bool, normed: bool) -> None:
    """Whole and partial rotation, with and without the head's norm, into another buffer and in place."""
    x, weight = random(5, 3, dim), random(dim, seed=2) if normed else None
    got, want = rotate(x, pairs, interleaved, weight=weight)
    assert error(got, want) < 1e-6
    again, _ = rotate(x, pairs, interleaved, weight=weight, in_place=True)
    assert np.array_equal(again, got)


def test_head_norm_without_rotation() -> None:
    got, want = rotate(random(2, 3, 64) * np.float32(1e-3), 32, False, weight=random(64, seed=2), norm_only=True)
    assert error(got, want) < 1e-6


# ---- KV cache
def rounded_to_bytes(x: np.ndarray) -> np.ndarray:
    """float64: what 8 bits under a scale per 32 elements keep of x."""
    blocks = x.reshape(*x.shape[:-1], -1, 32).astype(np.float32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    d = (largest * np.float32(1 / 127)).astype(np.float64)
    return (np.rint(blocks * (np.float32(127) / largest)) * d).reshape(x.shape)


def kept(x: np.ndarray, kv_type: str) -> np.ndarray:
    return rounded_to_bytes(x) if kv_type == "q8_0" else x.astype(KV_DTYPES[kv_type])


@dataclass
class Cache:
    """One sequence's pages, filled by the kernel. What was never written is NaN."""

    keys: np.ndarray  # [positions, G, D], as the cache's type keeps them
    values: np.ndarray  # [positions, G, V]
    kv_type: str
    pages: list[np.ndarray]
    table: np.ndarray
    layer_at: int = 128

    @classmethod
    def of(cls, keys: np.ndarray, values: np.ndarray, kv_type: str, target: str | None = None) -> Cache:
        n, heads, key_dim = keys.shape
        value_dim = values.shape[2]
        nbytes = cls.layer_at + kv_page_nbytes(heads, key_dim, value_dim, kv_type)
        pages = [aligned(nbytes, fill=0xFF) for _ in range(-(-n // PAGE))]
        table = np.array([p.ctypes.data for p in pages], np.uint64)
        positions = np.arange(n, dtype=np.int32)
        run(
            kernels(target).store_kv(key_dim, value_dim, kv_type), StoreKv, n * heads, key=keys, value=values,
            pages=table[positions // PAGE], positions=positions, key_stride=keys.strides[0],
            value_stride=values.strides[0], layer_at=cls.layer_at, kv_heads=heads,
        )  # fmt: skip
        assert all(intact(p) and (p[: cls.layer_at] == 0xFF).all() for p in pages)
        with np.errstate(over="ignore"):
            keys, values = (kept(x, kv_type) for x in (keys, values))
        return cls(keys, values, kv_type, pages, table)


def check_layout(kv_type: str, target: str | None = None) -> None:
    """Keys as tiles [D][16 positions], values (40 wide) 8 columns at a time; f16 rounds to nearest even everywhere."""
    n, heads, key_dim, value_dim = 70, 2, 24, 40
    scale = 10.0 ** np.random.default_rng(3).integers(-9, 6, (n, heads, 1))
    keys, values = (random(n, heads, key_dim) * scale).astype(np.float32), random(n, heads, value_dim, seed=1)
    values[0, 0, :8] = [np.inf, -np.inf, 65504, 65519, 65520, 2.0**-24, 2.0**-25, -0.0]
    values[1, 0, :4] = [1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-14 - 2.0**-25, 1e-30]
    cache = Cache.of(keys, values, kv_type, target)
    for number, page in enumerate(cache.pages):
        stored = page[cache.layer_at :].view(KV_DTYPES[kv_type]).reshape(heads, PAGE * (key_dim + value_dim))
        k_part, v_part = stored[:, : PAGE * key_dim], stored[:, PAGE * key_dim :]
        k_rows = k_part.reshape(heads, PAGE // TILE, key_dim, TILE).transpose(1, 3, 0, 2).reshape(PAGE, heads, key_dim)
        v_rows = v_part.reshape(heads, value_dim // 8, PAGE, 8).transpose(2, 0, 1, 3).reshape(PAGE, heads, value_dim)
        here = slice(number * PAGE, min(n, (number + 1) * PAGE))
        used = here.stop - here.start
        assert np.array_equal(k_rows[:used], cache.keys[here]) and np.array_equal(v_rows[:used], cache.values[here])
        assert np.isnan(k_rows[used:]).all() and np.isnan(v_rows[used:]).all()


@pytest.mark.parametrize("kv_type", KV_DTYPES)
def test_store_kv_layout(kv_type: str) -> None:
    check_layout(kv_type)


# ---- attention
@dataclass(frozen=True)
class Shape:
    """N query heads = G kv heads × chunks × R heads per task."""

    kv_type: str
    key_dim: int
    value_dim: int
    kv_heads: int
    queries: int
    chunks: int = 1
    window: int = 0
    sinks: bool = False
    scale: float = 0.2
    target: str | None = None

    @property
    def heads(self) -> int:
        return self.kv_heads * self.chunks * self.queries

    def cache(self, n: int, seed: int = 0) -> Cache:
        keys = random(n, self.kv_heads, self.key_dim, seed=seed)
        return Cache.of(keys, random(n, self.kv_heads, self.value_dim, seed=seed + 1), self.kv_type, self.target)

    def sink_logits(self) -> np.ndarray:
        return random(self.heads, seed=9) * 2

    def attend(self, q: np.ndarray, caches: list[Cache], positions: list[int]) -> np.ndarray:
        """float32 [tokens, N, V] for q [tokens, N, D]; token t looks at caches[t] from positions[t]."""
        out = floats(len(q), self.heads, self.value_dim, fill=7.0)
        run(
            kernels(self.target).attend(self.key_dim, self.value_dim, self.queries, self.kv_type), Attend,
            len(q) * self.kv_heads * self.chunks, q=q, out=out,
            tables=np.array([c.table.ctypes.data for c in caches], np.uint64),
            positions=np.array(positions, np.int32), sinks=self.sink_logits() if self.sinks else 0,
            q_stride=q.strides[0], out_stride=out.strides[0], layer_at=Cache.layer_at, kv_heads=self.kv_heads,
            chunks=self.chunks, window=self.window, scale=self.scale,
        )  # fmt: skip
        assert intact(out)
        return out

    def exact(self, q: np.ndarray, cache: Cache, position: int) -> np.ndarray:
        """float64 [N, V]: softmax over the visible positions (and the sink), written out."""
        first = max(0, position - self.window + 1) if self.window else 0
        keys, values = (x[first : position + 1].astype(np.float64) for x in (cache.keys, cache.values))
        if self.kv_type == "q8_0":  # the query is rounded as well, for the integer dot
            q = rounded_to_bytes(q)
        out = np.empty((self.heads, self.value_dim))
        for head in range(self.heads):
            group = head // (self.chunks * self.queries)
            scores = keys[:, group] @ q[head].astype(np.float64) * np.float32(self.scale)
            sink = float(self.sink_logits()[head]) if self.sinks else -np.inf
            top = max(scores.max(), sink)
            p = np.exp(scores - top)
            out[head] = p @ values[:, group] / (p.sum() + np.exp(sink - top))
        return out


SHAPES = {
    "plain": Shape("f32", 32, 32, 2, 2),
    "gqa": Shape("f16", 64, 64, 2, 4, chunks=2),
    "window": Shape("f16", 24, 16, 2, 3, window=7),
    "window_of_pages": Shape("f32", 40, 32, 1, 1, window=100, sinks=True),
    "sinks": Shape("f32", 32, 64, 2, 2, sinks=True),
    "latent": Shape("f16", 80, 64, 1, 8),
    "bytes": Shape("q8_0", 64, 32, 2, 3, window=90, sinks=True),
    "bytes_gqa": Shape("q8_0", 32, 96, 1, 4, chunks=2),
    "sharp": Shape("f32", 32, 32, 2, 2, sinks=True, scale=30.0),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@every_shape
@pytest.mark.parametrize("context", [1, 63, 64, 65, 200])
def test_attention(shape: Shape, context: int) -> None:
    """The newest token of a sequence, and older ones: later positions are invisible, unwritten ones are never read."""
    cache = shape.cache(context)
    positions = sorted({0, context // 2, context - 1})
    q = random(len(positions), shape.heads, shape.key_dim, seed=5)
    got = shape.attend(q, [cache] * len(positions), positions)
    want = np.stack([shape.exact(q[i], cache, p) for i, p in enumerate(positions)])
    # rounding of a score moves its weight by as much, relatively
    largest_score = shape.scale * np.abs(q).max() * np.abs(cache.keys.astype(np.float32)).max() * shape.key_dim**0.5
    assert error(got, want) < 2e-6 * max(1.0, largest_score / 8)


@every_shape
def test_a_query_does_not_depend_on_its_company(shape: Shape) -> None:
    """Alone, with others of its sequence in any order, and beside another sequence: the same bits."""
    long, short = shape.cache(150), shape.cache(70, seed=20)
    places = [(long, 149), (short, 69), (long, 3), (long, 64), (short, 0), (long, 149)]
    q = random(len(places), shape.heads, shape.key_dim, seed=6)
    q[5] = q[0]
    alone = [shape.attend(q[i : i + 1], [c], [p])[0] for i, (c, p) in enumerate(places)]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 2, 0], [2, 4]):
        caches, positions = zip(*(places[i] for i in order), strict=True)
        together = shape.attend(q[order], list(caches), list(positions))
        assert all(np.array_equal(row, alone[i]) for row, i in zip(together, order, strict=True))
    assert np.array_equal(alone[0], alone[5])


@every_shape
def test_a_query_does_not_depend_on_what_was_cached_later(shape: Shape) -> None:
    """Token by token or as one prompt: the cache holds more positions, the result has the same bits."""
    whole = shape.cache(130)
    first = Cache.of(random(130, shape.kv_heads, shape.key_dim)[:66],
                     random(130, shape.kv_heads, shape.value_dim, seed=1)[:66], shape.kv_type)  # fmt: skip
    q = random(1, shape.heads, shape.key_dim, seed=7)
    assert np.array_equal(shape.attend(q, [whole], [65]), shape.attend(q, [first], [65]))


def test_heads_per_task_do_not_matter() -> None:
    """R is a matter of speed: 8 heads as 1 × 8, 2 × 4 or 8 × 1 give the same bits."""
    results = []
    for queries in (1, 4, 8):
        shape = Shape("f16", 32, 32, 1, queries, chunks=8 // queries)
        cache = shape.cache(100)
        results.append(shape.attend(random(1, 8, 32, seed=8), [cache], [99]))
    assert all(np.array_equal(r, results[0]) for r in results)


def test_sinks_only_add_to_the_denominator() -> None:
    """A sink far above all scores takes nearly all weight, one far below takes none."""
    plain, with_sink = Shape("f32", 32, 32, 2, 2), SHAPES["sinks"]
    assert with_sink.sinks and not plain.sinks
    cache = plain.cache(65)
    q = random(1, 4, 32, seed=5)
    want = plain.attend(q, [cache], [64])
    for logit, factor in ((-80.0, 1.0), (80.0, 0.0)):
        out = floats(1, 4, 32)
        run(
            kernels().attend(32, 32, 2, "f32"), Attend, 2, q=q, out=out, positions=np.array([64], np.int32),
            tables=np.array([cache.table.ctypes.data], np.uint64), sinks=np.full(4, logit, np.float32), q_stride=512,
            out_stride=512, layer_at=Cache.layer_at, kv_heads=2, chunks=1, scale=plain.scale,
        )  # fmt: skip
        assert np.abs(out - want * factor).max() < 1e-6
