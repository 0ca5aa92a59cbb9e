"""Narrower CPUs in the same process: kernels for AVX2, SSE2 and plain vectors agree with float64 and with the best.

A reduced set, because LLVM takes seconds to compile the dot products of the narrow ones.
"""

from __future__ import annotations

from dataclasses import replace

import llvmlite.binding as llvm
import numpy as np
import pytest
from jit_util import (
    CACHE_DIR,
    dequantize,
    error,
    floats,
    gather_rows,
    kernels,
    matmul,
    pack_tokens,
    pack_weights,
    random_rows,
    rounded_activations,
    weights_of,
)
from test_jit_attention import SHAPES, check_layout, random
from test_jit_formats import same_bits

from colibri_offload.jit.compiler import Compiler
from colibri_offload.jit.formats import FORMATS
from colibri_offload.jit.kernels.activations import FLOAT32, INT8, activations_for
from colibri_offload.jit.kernels.matmul import emit_matmul
from colibri_offload.jit.targets import NeonDot, available

NARROW = [t for t in ("avx2", "sse2", "generic") if t != available()[0]]
narrow = pytest.mark.parametrize("target", NARROW)
# the plain target's other products differ from SSE2's in dot4 alone, and would take eight seconds
PRODUCTS = [(t, f) for t in NARROW for f in ("Q8_0", "F16", "Q4_K") if t != "generic" or f == "Q8_0"]


@pytest.mark.parametrize(("target", "name"), PRODUCTS)
def test_products(target: str, name: str) -> None:
    """Right to 3e-6, equal to the best target up to the order of float additions, and batch invariant."""
    k, fmt = kernels(target), FORMATS[name]
    data = random_rows(fmt, np.random.default_rng(0), 40, 512)
    w, best = weights_of(k, fmt, data, 512), weights_of(kernels(), fmt, data, 512)
    assert np.array_equal(w.packed, best.packed)
    x = np.random.default_rng(1).standard_normal((13, 512)).astype(np.float32)
    alone = np.concatenate([matmul(k, w, "int8", x[t : t + 1]) for t in range(13)])
    assert error(alone, rounded_activations(activations_for(fmt, "int8"), x) @ w.values.T) < 3e-6
    assert error(alone, matmul(kernels(), best, "int8", x)) < 1e-6
    for n, chunk in ((2, 1), (3, 3), (5, 2), (13, 1)):
        assert np.array_equal(matmul(k, w, "int8", x[:n], chunk=chunk), alone[:n])


@narrow
@pytest.mark.parametrize("fill", [0x00, 0x7F, 0x80, 0xFF])
def test_largest_sums_do_not_saturate(target: str, fill: int) -> None:
    """AVX2's byte products saturate in 16 bits: 255·127·2 does not fit, so bit 7 must go its own way."""
    k, fmt = kernels(target), FORMATS["Q8_0"]
    w = weights_of(k, fmt, random_rows(fmt, np.random.default_rng(2), 16, 128, fill), 128)
    x = np.ones((2, 128), np.float32)
    x[1, ::2] = -1
    got = matmul(k, w, "int8", x)
    assert np.abs(got - rounded_activations(INT8, x) @ w.values.T).max() <= 3e-6 * 128 * 1.28


@narrow
@pytest.mark.parametrize("name", ["Q6_K", "Q5_1", "IQ4_NL", "BF16"])
def test_rows(target: str, name: str) -> None:
    """Exact values: the shifts, tables and half conversions of each target."""
    k, fmt = kernels(target), FORMATS[name]
    data = random_rows(fmt, np.random.default_rng(3), 17, 256)
    got = gather_rows(k, fmt, pack_weights(k, fmt, data, 256), np.arange(17), 256)
    assert same_bits(got, dequantize(fmt, data, 256))


@narrow
def test_every_half_is_loaded_exactly(target: str) -> None:
    """Without F16C halves are converted with integers: subnormals, infinities and NaNs included."""
    k, halves = kernels(target), np.arange(65536, dtype=np.uint16).view(np.float16).reshape(32, 2048)
    packed = pack_weights(k, FORMATS["F16"], halves.view(np.uint8), 2048)
    got = gather_rows(k, FORMATS["F16"], packed, np.arange(32), 2048)
    assert np.array_equal(got, halves.astype(np.float32), equal_nan=True)


@narrow
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_cache_layout(target: str, kv_type: str) -> None:
    check_layout(kv_type, target)


@narrow
@pytest.mark.parametrize("name", ["window", "bytes"])
def test_attention(target: str, name: str) -> None:
    shape = replace(SHAPES[name], target=target)
    cache = shape.cache(130)
    positions = [0, 63, 64, 129]
    q = random(4, shape.heads, shape.key_dim, seed=5)
    got = shape.attend(q, [cache] * 4, positions)
    assert error(got, np.stack([shape.exact(q[i], cache, p) for i, p in enumerate(positions)])) < 2e-6
    assert error(got, replace(shape, target=None).attend(q, [cache] * 4, positions)) < 2e-6


@narrow
def test_packing_tokens(target: str) -> None:
    """The same int8 values and scales on every target, and the same norm to rounding."""
    x = random(5, 70)
    for act in (INT8, FLOAT32):
        ours, best = (pack_tokens(kernels(t), act, x, 3).unpack() for t in (target, None))
        assert all(np.array_equal(a, b) for a, b in zip(ours[:2], best[:2], strict=True))
        assert np.allclose(ours[2], best[2], rtol=0, atol=1e-5)
    rows = floats(2, 5, 70)
    for t, out in zip((target, None), rows, strict=True):
        weight = random(70, seed=1)
        pack_tokens(kernels(t), INT8, x, 3, weight=weight, eps=1e-6, rows_out=out, rows_out_stride=out.strides[0])
    assert error(rows[0], rows[1]) < 1e-6


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0"])
def test_aarch64_uses_its_dot_instruction(name: str) -> None:
    """Compiled, not run: the code for AArch64 Linux multiplies bytes by sdot and calls nothing."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = NeonDot(cross=True)
    try:
        compiler = Compiler(target, CACHE_DIR)
    except RuntimeError as reason:
        pytest.skip(f"this llvmlite has no AArch64 back end: {reason}")
    text = compiler.assembly("matmul", lambda m: emit_matmul(m, target, FORMATS[name], INT8))
    instructions = [line.split() for line in text.splitlines() if line.startswith("\t") and not line.startswith("\t.")]
    assert sum(i[0] == "sdot" for i in instructions) >= 8
    called = {i[1] for i in instructions if i[0] == "bl"}
    assert all("dot_" in f for f in called), called
