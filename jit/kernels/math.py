"""Elementary functions on vectors, the same on every target."""

from __future__ import annotations

from colibri_offload.jit.emit import Fn, Val, f32, i32
from colibri_offload.jit.emit.types import like


def exp(k: Fn, x: Val) -> Val:
    """e^x to about 2 ulp; arguments are clamped to [−87, 88], so there is neither 0 nor Inf.

    x = n·ln2 + f, |f| ≤ ln2/2; e^f by the Cephes expf polynomial.
    """
    x = x.max(-87.0).min(88.0)
    shifted = x * 1.4426950408889634 + 12582912.0
    n_int, n = shifted.bits(like(x.t, i32)), shifted - 12582912.0
    f = n.fma(-1.428606765330187e-06, n.fma(-0.693145751953125, x))
    p = k.const(x.t, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p.fma(f, k.const(x.t, c))
    p = (p * f).fma(f, f + 1.0)
    return ((n_int << 23) + p.bits(like(x.t, i32))).bits(like(x.t, f32))


def sigmoid(k: Fn, x: Val) -> Val:
    return 1.0 / (exp(k, -x) + 1.0)


def silu(k: Fn, x: Val) -> Val:
    return x / (exp(k, -x) + 1.0)
