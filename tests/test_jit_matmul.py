"""The matrix product in every format and activation mode, against float64 on identically rounded inputs."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from jit_util import (
    FORMAT_MODES,
    Weights,
    aligned,
    columns_for,
    error,
    floats,
    kernels,
    matmul,
    pack_tokens,
    random_rows,
    rounded_activations,
    run,
    weights_of,
)

from colibri_offload.jit.formats import FORMATS
from colibri_offload.jit.kernels.activations import INT8, activations_for, padded_tokens, tile_counts
from colibri_offload.jit.kernels.matmul import Matmul

TOKENS = (1, 2, 3, 5, 8, 13)
every_kernel = pytest.mark.parametrize(("name", "mode"), FORMAT_MODES)


@cache
def matrix(name: str, rows: int = 40, fill: int | None = None) -> Weights:
    fmt = FORMATS[name]
    cols = columns_for(fmt)
    return weights_of(kernels(), fmt, random_rows(fmt, np.random.default_rng(0), rows, cols, fill), cols)


def tokens_for(w: Weights, n: int = 13, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, w.cols)).astype(np.float32)


def exact(w: Weights, mode: str, x: np.ndarray) -> np.ndarray:
    return rounded_activations(activations_for(w.fmt, mode), x) @ w.values.T


@every_kernel
def test_product_and_batch_invariance(name: str, mode: str) -> None:
    """Right to 3e-6; and a token's bits depend neither on its neighbours and its place nor on the chunk size."""
    w = matrix(name)
    x = tokens_for(w)
    alone = np.concatenate([matmul(kernels(), w, mode, x[t : t + 1]) for t in range(len(x))])
    assert error(alone, exact(w, mode, x)) < 3e-6
    for n in TOKENS:
        for chunk in (1, 2, 3, 5):
            assert np.array_equal(matmul(kernels(), w, mode, x[:n], chunk=chunk), alone[:n])
    assert np.array_equal(matmul(kernels(), w, mode, x[::-1].copy()), alone[::-1])


@every_kernel
def test_bias_and_accumulation(name: str, mode: str) -> None:
    w = matrix(name)
    x = tokens_for(w, 3)
    rng = np.random.default_rng(5)
    bias, into = rng.standard_normal(w.rows).astype(np.float32), rng.standard_normal((3, w.rows)).astype(np.float32)
    plain = matmul(kernels(), w, mode, x)
    assert np.array_equal(matmul(kernels(), w, mode, x, bias=bias), plain + bias)
    assert np.array_equal(matmul(kernels(), w, mode, x, into=into), plain + into)
    assert np.array_equal(matmul(kernels(), w, mode, x, bias=bias, into=into), (plain + bias) + into)


@every_kernel
def test_zeros_give_zero(name: str, mode: str) -> None:
    w = matrix(name)
    assert not np.any(matmul(kernels(), w, mode, np.zeros((3, w.cols), np.float32)))


@every_kernel
def test_huge_and_tiny_activations(name: str, mode: str) -> None:
    """1e30 stays accurate and finite; int8 makes 1e-38 zero, float32 keeps it to its last subnormal bit."""
    w = matrix(name)
    x = tokens_for(w, 3)
    huge = x * np.float32(1e30)
    assert error(matmul(kernels(), w, mode, huge), exact(w, mode, huge)) < 3e-6
    tiny = x * np.float32(1e-38)
    got, want = matmul(kernels(), w, mode, tiny), exact(w, mode, tiny)
    if activations_for(w.fmt, mode) is INT8:
        assert not np.any(got)
    else:
        assert np.abs(got - want).max() <= 3e-6 * np.abs(want).max() + w.cols * 2.0**-149 * np.abs(w.values).max()
    mixed = x.copy()
    mixed[:, :32] *= np.float32(1e-38)
    mixed[:, 32:64] = 0
    mixed[:, 64:96] *= np.float32(1e30)
    assert error(matmul(kernels(), w, mode, mixed), exact(w, mode, mixed)) < 3e-6


@pytest.mark.parametrize("name", [n for n in FORMATS if not FORMATS[n].is_float])
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x7F, 0x80])
def test_extreme_quants_do_not_overflow(name: str, fill: int) -> None:
    """All quants at an end of their range against activations that are all ±127: the largest sums there are."""
    w = matrix(name, 17, fill)
    x = np.ones((4, w.cols), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    x[3, 1::4] = -1
    for n in (1, 4):
        got, want = matmul(kernels(), w, "int8", x[:n]), exact(w, "int8", x[:n])
        # formats that subtract 128 after the dot round relative to 128·scale, not to the weight
        largest = np.abs(w.values).max() + 1.28 * w.fmt.wide
        assert np.abs(got - want).max() <= 3e-6 * w.cols * largest


@every_kernel
def test_infinity_and_nan_stay_visible_in_their_own_token(name: str, mode: str) -> None:
    """One element is enough: rounding to int8 must not launder it into a number."""
    w = matrix(name)
    x = tokens_for(w, 5)
    good = matmul(kernels(), w, mode, x)
    x[2, 40] = np.nan
    x[3, 7] = np.inf
    bad = matmul(kernels(), w, mode, x)
    assert np.array_equal(bad[[0, 1, 4]], good[[0, 1, 4]])
    assert not np.isfinite(bad[2]).any() and not np.isfinite(bad[3]).any()


@pytest.mark.parametrize("cols", [32, 48, 96, 2048])
def test_column_counts(cols: int) -> None:
    for name in FORMATS:
        fmt = FORMATS[name]
        if cols % fmt.block_elements:
            continue
        w = weights_of(kernels(), fmt, random_rows(fmt, np.random.default_rng(cols), 17, cols), cols)
        x = tokens_for(w, 3)
        assert error(matmul(kernels(), w, "int8", x), exact(w, "int8", x)) < 3e-6


@pytest.mark.parametrize(("name", "mode"), [("Q8_0", "int8"), ("F16", "float32"), ("Q4_K", "float32")])
def test_batches(name: str, mode: str) -> None:
    """One call for several products with their own weights, tokens and outputs, as attention heads need."""
    k, fmt = kernels(), FORMATS[name]
    act = activations_for(fmt, mode)
    matrices = [weights_of(k, fmt, random_rows(fmt, np.random.default_rng(s), 40, 256), 256) for s in range(3)]
    first = matrices[0]
    x = np.random.default_rng(1).standard_normal((3, 6, 256)).astype(np.float32)
    want = [matmul(k, w, mode, x[i]) for i, w in enumerate(matrices)]
    w_all, x_batch = aligned(3 * first.packed.nbytes), act.nbytes(6, first.blocks)
    w_all[:] = np.concatenate([w.packed for w in matrices])
    tokens = aligned(3 * x_batch)
    full, tail = tile_counts(6)
    for i in range(3):
        tokens[i * x_batch : (i + 1) * x_batch] = pack_tokens(k, act, x[i], first.blocks).data
    y = floats(3, padded_tokens(6), 48)
    run(
        k.matmul(fmt, act), Matmul, 3 * 2, w=w_all, x=tokens, y=y, groups=3, steps=first.steps, x_blocks=first.blocks,
        full_tiles=full, tail_tile=tail, y_stride=48 * 4, chunk=2, tasks_per_batch=2, w_batch=first.packed.nbytes,
        x_batch=x_batch, y_batch=y.strides[0],
    )  # fmt: skip
    assert all(np.array_equal(y[i, :6, :40], want[i]) for i in range(3))
