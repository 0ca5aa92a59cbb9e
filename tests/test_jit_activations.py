"""Packing tokens: layout, rounding, RMSNorm, gathering; and the elementary functions that the activations use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jit_util import aligned, floats, int8_blocks, intact, kernels, pack_tokens, run

from colibri_offload.jit.emit import Fn, Struct, f32, i64, ptr, vec
from colibri_offload.jit.kernels.activations import ACTIVATIONS, INT8, Activations, padded_tokens, tile_counts
from colibri_offload.jit.kernels.experts import ExpertActivation
from colibri_offload.jit.kernels.math import exp, sigmoid, silu
from colibri_offload.jit.kernels.pack import PackTokens

TOKENS = (1, 2, 3, 5, 8, 13)
both = pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=ACTIVATIONS)


def random(tokens: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, columns)).astype(np.float32)


def same(act: Activations, x: np.ndarray, blocks: int, y: np.ndarray, **fields: Any) -> bool:
    """Packing x with these fields and packing y as it is give the same token, bit for bit."""
    a, b = pack_tokens(kernels(), act, x, blocks, **fields), pack_tokens(kernels(), act, y, blocks)
    return all(np.array_equal(p, q) for p, q in zip(a.unpack(), b.unpack(), strict=True))


def test_tiles_hold_all_tokens() -> None:
    for tokens in range(1, 100):
        full, tail = tile_counts(tokens)
        assert tail in (0, 1, 2, 4)
        assert tokens <= 8 * full + tail == padded_tokens(tokens) <= tokens + 3


@both
@pytest.mark.parametrize("tokens", TOKENS)
def test_layout(act: Activations, tokens: int) -> None:
    """70 columns in 4 blocks: the rest of the third block, the fourth block and the padding tokens are zero."""
    x = random(tokens, 70)
    values, scales, sums = pack_tokens(kernels(), act, x, 4).unpack()
    padded = np.zeros((padded_tokens(tokens), 128), np.float32)
    padded[:tokens, :70] = x
    if act is INT8:
        q, d = int8_blocks(padded)
        assert np.array_equal(values, q) and np.array_equal(scales, d)
        halves = q.reshape(*q.shape[:2], 2, 16).sum(-1)
        want = -d[..., None] * np.concatenate([halves.sum(-1, keepdims=True), halves], -1).astype(np.float32)
        assert np.array_equal(sums, want)
    else:
        assert np.array_equal(values.reshape(len(padded), 128), padded)
        halves = -padded.reshape(-1, 4, 2, 16).astype(np.float64).sum(-1)
        assert np.allclose(sums, np.concatenate([halves.sum(-1, keepdims=True), halves], -1), rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    "block",
    [[127.0, -127.0], [1.0, 0.5, -0.5], [2.5, 127, 1.5], [3e-30], [9e-31], [1e-45], [3.4e38, -1e38], [-5.0] * 32],
    ids=str,
)
def test_rounding_to_int8(block: list[float]) -> None:
    """Half to even, both ends of the range, the limit below which a block is zero, the largest floats."""
    x = np.zeros((1, 32), np.float32)
    x[0, : len(block)] = block
    values, scales, _ = pack_tokens(kernels(), INT8, x, 1).unpack()
    q, d = int8_blocks(x)
    assert np.array_equal(values, q) and np.array_equal(scales, d)
    assert np.abs(values.astype(int)).max() in (0, 127)


@both
@pytest.mark.parametrize("columns", [1, 31, 32, 70, 576])
def test_rms_norm(act: Activations, columns: int) -> None:
    """rows_out within 1e-6 of float64, and the packed tokens are those very rows; scales from 1e-3 to 1e3."""
    x = random(13, columns) * np.logspace(-3, 3, 13, dtype=np.float32)[:, None]
    weight, eps = random(1, columns, 1)[0], 1e-5
    blocks = -(-columns // 32) + 1
    rows = floats(13, columns + 5, fill=7.0)
    fields = {"weight": weight, "eps": eps, "rows_out": rows, "rows_out_stride": rows.strides[0]}
    pack_tokens(kernels(), act, x, blocks, **fields)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(1, keepdims=True) + np.float32(eps)) * weight
    assert (np.abs(rows[:, :columns] - want) <= 1e-6 * np.abs(want)).all()
    assert (rows[:, columns:] == 7.0).all() and intact(rows)
    assert same(act, x, blocks, rows[:, :columns].copy(), weight=weight, eps=eps)


@both
def test_norm_without_packing(act: Activations) -> None:
    """out null: only the float rows are written (the routers' input)."""
    x, weight = random(5, 64), random(1, 64, 1)[0]
    rows, again = floats(5, 64), floats(5, 64)
    fields = {"weight": weight, "eps": 1e-6, "rows_out_stride": 256}
    pack_tokens(kernels(), act, x, 2, rows_out=rows, **fields)
    untouched = pack_tokens(kernels(), act, x, 2, rows_out=again, out=0, **fields)
    assert np.array_equal(rows, again) and np.any(rows)
    assert (untouched.data == untouched.data[0]).all()


@both
def test_a_token_is_packed_alike_in_every_company(act: Activations) -> None:
    x, weight = random(13, 100), random(1, 100, 1)[0]
    fields = {"weight": weight, "eps": 1e-6}
    alone = [pack_tokens(kernels(), act, x[t : t + 1], 4, **fields).unpack() for t in range(13)]
    for n in TOKENS:
        together = pack_tokens(kernels(), act, x[:n], 4, **fields).unpack()
        for part, whole in enumerate(together):
            assert all(np.array_equal(whole[t], alone[t][part][0]) for t in range(n))


@both
def test_gathering_by_index(act: Activations) -> None:
    """Rows in any order and twice; −1 is no token."""
    x = random(9, 96)
    index = np.array([8, 0, 0, -1, 3, -1], np.int32)
    want = np.where(index[:, None] < 0, 0, x[index]).astype(np.float32)
    assert same(act, x, 3, want, tokens=len(index), index=index)


@both
def test_tiles_from_a_table(act: Activations) -> None:
    """(first token, T) per task: several small groups of tokens in one call, each in tiles of its own."""
    x = random(13, 64)
    tiles = np.array([(0, 8), (8, 1), (9, 4)], np.int32)
    got = aligned(13 * 2 * act.token_nbytes)
    run(
        kernels().pack_tokens(act), PackTokens, 3, src=x, out=got, tiles=tiles, src_stride=256, columns=64, x_blocks=2,
        tokens=13, tiles_per_batch=3,
    )  # fmt: skip
    groups = [pack_tokens(kernels(), act, x[first : first + size], 2).data for first, size in tiles]
    assert np.array_equal(got, np.concatenate(groups)) and intact(got)


@both
def test_batches(act: Activations) -> None:
    x = random(18, 64).reshape(3, 6, 64)
    full, tail = tile_counts(6)
    tiles, nbytes = full + (tail > 0), act.nbytes(6, 2)
    out = aligned(3 * nbytes)
    run(
        kernels().pack_tokens(act), PackTokens, 3 * tiles, src=x, out=out, src_stride=256, columns=64, x_blocks=2,
        tokens=6, full_tiles=full, tail_tile=tail, tiles_per_batch=tiles, src_batch=x.strides[0], out_batch=nbytes,
    )  # fmt: skip
    assert np.array_equal(out, np.concatenate([pack_tokens(kernels(), act, x[i], 2).data for i in range(3)]))


# ---- elementary functions
Map = Struct("Map", x=ptr, y=ptr, z=ptr)


def apply(name: str, f, x: np.ndarray, y: np.ndarray | None = None) -> np.ndarray:  # type: ignore[no-untyped-def]
    """f over vectors of x (and y), through a kernel made here."""
    k = kernels()
    t = vec(f32, k.target.lanes)

    def build(module) -> None:  # type: ignore[no-untyped-def]
        with Fn(module, k.target, "apply", {"args": ptr, "task": i64}) as fn:
            m, at = Map.at(fn.args), fn.task * (4 * k.target.lanes)
            (m.z + at).store(f(fn, (m.x + at).load(t, 0, 4), (m.y + at).load(t, 0, 4)), 0, 4)

    (address,) = k.compiler.link(f"test.{name}", build, "apply")
    x = np.ascontiguousarray(x, np.float32)
    z = np.zeros_like(x)
    run(address, Map, x.size // k.target.lanes, x=x, y=x if y is None else np.ascontiguousarray(y, np.float32), z=z)
    return z


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    return np.abs(got - want) / np.spacing(np.abs(want).astype(np.float32))


def test_exp() -> None:
    x = np.concatenate([np.linspace(-87, 88, 1 << 18), np.linspace(-1, 1, 1 << 16)]).astype(np.float32)
    got = apply("exp", lambda k, x, y: exp(k, x), x)
    assert ulps(got, np.exp(x.astype(np.float64))).max() <= 2
    ends = np.array([-np.inf, -1e30, -88, 89, 1e30, np.inf, 0, -0.0] * 2, np.float32)
    got = apply("exp", lambda k, x, y: exp(k, x), ends)
    assert np.isfinite(got).all() and (got > 0).all() and got[6] == got[7] == 1


def sigmoid64(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def test_sigmoid_and_silu() -> None:
    x = np.linspace(-80, 80, 1 << 18).astype(np.float32)
    assert ulps(apply("sigmoid", lambda k, x, y: sigmoid(k, x), x), sigmoid64(x)).max() <= 4
    assert ulps(apply("silu", lambda k, x, y: silu(k, x), x), x * sigmoid64(x))[x != 0].max() <= 4
    far = np.array([-1e30, -1000, -100, 100, 1000, 1e30, 0, -0.0] * 2, np.float32)
    assert np.abs(apply("silu", lambda k, x, y: silu(k, x), far) - np.maximum(far, 0)).max() <= 1e-7


def test_expert_activations() -> None:
    rng = np.random.default_rng(0)
    gate, up = rng.standard_normal((2, 1 << 12)).astype(np.float32) * 8
    g, u = gate.astype(np.float64), up.astype(np.float64)
    plain = ExpertActivation("silu")
    got = apply("act.silu", lambda k, x, y: plain.emit(k, x, y), gate, up)
    assert (np.abs(got - g * sigmoid64(g) * u) <= 1e-6 * np.abs(g * u)).all()
    oai = ExpertActivation("swiglu_oai", 1.702, 7.0)

    g, u = np.minimum(g, 7), u.clip(-7, 7)
    got = apply("act.oai", lambda k, x, y: oai.emit(k, x, y), gate, up)
    want = (u + 1) * g * sigmoid64(1.702 * g)
    assert (np.abs(got - want) <= 1e-6 * np.abs(g * (np.abs(u) + 1))).all()
