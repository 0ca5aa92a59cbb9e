"""The element types of safetensors, and tensors as they are stored.

Source: https://github.com/huggingface/safetensors (format, dtypes); Micikevicius et al. 2022, arXiv:2209.05433 (FP8);
OCP Microscaling specification 1.0 (E8M0).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from colibri_offload.checkpoint.base import Decode, FileSlice, Tensor, reshaper, stacked


def _fp8_table(exponent_bits: int, mantissa_bits: int, bias: int, infinities: bool) -> np.ndarray:
    """float32 [256]: the value of every byte of a signed 8-bit float.

    With `infinities` (E5M2) the top exponent holds Inf and NaN; without (E4M3) only an all-ones byte is NaN.
    """
    code = np.arange(256)
    sign = np.where(code & 0x80, -1.0, 1.0)
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    fraction = mantissa / (1 << mantissa_bits)
    value = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), np.ldexp(1 + fraction, exponent - bias))
    top = exponent == (1 << exponent_bits) - 1
    if infinities:
        value = np.where(top, np.where(mantissa == 0, np.inf, np.nan), value)
    else:
        value = np.where(top & (mantissa == (1 << mantissa_bits) - 1), np.nan, value)
    return (sign * value).astype(np.float32)


def _e8m0_table() -> np.ndarray:
    """float32 [256]: 2^(byte − 127); the last byte is NaN."""
    value = np.ldexp(np.ones(256), np.arange(256) - 127)
    value[255] = np.nan
    return value.astype(np.float32)


F8_TABLES = {
    "F8_E4M3": _fp8_table(4, 3, 7, infinities=False),
    "F8_E5M2": _fp8_table(5, 2, 15, infinities=True),
    "F8_E8M0": _e8m0_table(),
}

# Bytes per element of every type that is read.
ITEM_NBYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclass(frozen=True)
class Stored:
    """A tensor as a safetensors file holds it, before quantised ones are put together."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    slice: FileSlice


def as_float32(raw: memoryview, dtype: str) -> np.ndarray:
    """float32 [n] of a floating-point type; exact for all but F64, which is rounded."""
    if dtype in F8_TABLES:
        return F8_TABLES[dtype][np.frombuffer(raw, np.uint8)]
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]).astype(np.float32)


def float32_rows(values: np.ndarray) -> np.ndarray:
    """uint8 [..., 4·K]: float32 values [..., K] as rows of the format F32."""
    return np.ascontiguousarray(values, "<f4").view(np.uint8)


def plain_tensor(stored: Stored) -> Tensor:
    """The tensor as stored; F64 and the 8-bit floats, which no kernel reads, decode to F32."""
    if stored.dtype == "F64" or stored.dtype in F8_TABLES:
        return stacked(stored.name, stored.shape, "F32", (stored.slice,), _widen(stored.dtype))
    row_nbytes = ITEM_NBYTES[stored.dtype] * (stored.shape[-1] if stored.shape else 1)
    return Tensor(stored.name, stored.shape, stored.dtype, (stored.slice,), reshaper(stored.shape, row_nbytes))


def _widen(dtype: str) -> Callable[[tuple[int, ...]], Decode]:
    def decode_for(shape: tuple[int, ...]) -> Decode:
        return lambda raws: float32_rows(as_float32(raws[0], dtype).reshape(shape or (1,)))

    return decode_for
