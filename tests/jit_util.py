"""Drivers of single kernels for the tests of the jit package: buffers, descriptors, random weights, references.

Everything a reference needs is computed here from the formats' definitions and in float64, never by a kernel.
"""

from __future__ import annotations

import ctypes
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from colibri_offload.jit.compiler import Compiler
from colibri_offload.jit.emit import Struct
from colibri_offload.jit.formats import FORMATS, ROWS, Format
from colibri_offload.jit.formats.scaled import ScaledBytes
from colibri_offload.jit.kernels import Kernels
from colibri_offload.jit.kernels.activations import INT8, Activations, activations_for, padded_tokens, tile_counts
from colibri_offload.jit.kernels.matmul import Matmul
from colibri_offload.jit.kernels.pack import PackTokens, PackWeights
from colibri_offload.jit.kernels.rows import GatherRows
from colibri_offload.jit.targets import available, get_target

TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
GOLDEN = Path(__file__).parent / "golden" / "gguf" / "dequant_vectors.npz"
MODES = ("int8", "float32")
# every pair of format and activation mode that has kernels of its own
FORMAT_MODES = [(f, m) for f in FORMATS for m in MODES if m == "float32" or FORMATS[f].integer]
CANARY = 0xA5
# where a block's f16 scale and its f16 minimum lie, unless there is a scale alone, in front
HALVES: dict[str, tuple[int, int | None]] = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208, None), "Q2_K": (80, 82),
    "Q3_K": (108, None),
}  # fmt: skip

_cache = tempfile.TemporaryDirectory(prefix="colibri-jit-tests-")
CACHE_DIR = Path(_cache.name)


@cache
def kernels(target: str | None = None) -> Kernels:
    """The kernels of a target, shared by all tests of the session; skips the test where the CPU lacks it."""
    if target is not None and target not in available():
        pytest.skip(f"this CPU cannot run {target}")
    return Kernels(Compiler(get_target(target), CACHE_DIR))


def aligned(nbytes: int, fill: int = 0xFF) -> np.ndarray:
    """uint8 [nbytes], 64-byte-aligned, followed by 64 canary bytes (see `intact`). 0xFF: unwritten floats are NaN."""
    raw = np.full(nbytes + 128, CANARY, np.uint8)
    start = -raw.ctypes.data % 64
    raw[start : start + nbytes] = fill
    return raw[start : start + nbytes]


def intact(buffer: np.ndarray) -> bool:
    """Nothing was written behind a buffer made by `aligned`."""
    base = buffer
    while isinstance(base.base, np.ndarray):
        base = base.base
    end = buffer.ctypes.data - base.ctypes.data + buffer.nbytes
    return bool((base[end : end + 64] == CANARY).all())


def floats(*shape: int, fill: float = 0.0) -> np.ndarray:
    """float32 [shape], 64-byte-aligned."""
    out = aligned(4 * int(np.prod(shape))).view(np.float32).reshape(shape)
    out[...] = fill
    return out


def run(address: int, struct: Struct, tasks: int, **fields: Any) -> None:
    """Fill a descriptor (arrays stand for their addresses) and run all its tasks, last one first."""
    args = struct.new()
    for name, value in fields.items():
        args[name] = value.ctypes.data if isinstance(value, np.ndarray) else value
    task = TASK(address)
    for i in reversed(range(tasks)):
        task(args.ctypes.data, i)


# ---- weights
def columns_for(fmt: Format, blocks: int = 2) -> int:
    """A column count that is no multiple of the format's step where its block allows that."""
    return fmt.block_elements * blocks if fmt.block_elements > 32 else 32 * 7 if fmt.block_elements == 32 else 200


def random_rows(fmt: Format, rng: np.random.Generator, rows: int, cols: int, fill: int | None = None) -> np.ndarray:
    """uint8 [rows, row_nbytes]: random quants (or all bytes `fill`) and scales of both signs and sane size."""
    if fmt.is_float:
        return fmt.quantize(rng.standard_normal((rows, cols)).astype(np.float32))
    out = rng.integers(0, 256, (rows, fmt.row_nbytes(cols)), dtype=np.uint8)
    if fill is not None:
        out[:] = fill
    blocks = out.reshape(rows, -1, fmt.block_nbytes)
    n = blocks.shape[:2]

    def halves(low: float, high: float) -> np.ndarray:
        x = rng.uniform(low, high, n) * rng.choice([-1, 1], n)
        return x.astype(np.float16)[..., None].view(np.uint8)

    if isinstance(fmt, ScaledBytes):
        scales = rng.uniform(1e-3, 1e-2, n) * rng.choice([-1, 1], n)
        blocks[..., :4] = scales.astype(np.float32)[..., None].view(np.uint8)
        if fmt.name == "F8_E4M3":
            blocks[..., 4:][blocks[..., 4:] & 0x7F == 0x7F] = 0x7E  # no NaN
        return out
    if fmt.name == "MXFP4":
        blocks[..., 0] = rng.integers(120, 130, n)
        return out
    if fmt.name == "Q4_Z":
        blocks[..., 3] = 0
        blocks[..., 2] = blocks[..., 2] % 16 // 2  # never 15, which would make all quants of 15 zeros
    scale_at, minimum_at = HALVES.get(fmt.name, (0, None))
    blocks[..., scale_at : scale_at + 2] = halves(1e-3, 1e-2)
    if minimum_at is not None:
        blocks[..., minimum_at : minimum_at + 2] = halves(1e-3, 5e-2)
    return out


def _e4m3(byte: int) -> float:
    """The value of an e4m3fn byte, from its definition."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([_e4m3(b) for b in range(256)], np.float32)


def _own_formats(fmt: Format, rows: np.ndarray) -> np.ndarray:
    """float32 [rows, columns] of the formats that no file has."""
    blocks = rows.reshape(len(rows), -1, fmt.block_nbytes)
    if fmt.name == "Q4_Z":
        d = blocks[..., :2].copy().view(np.float16).astype(np.float32)
        q = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], 2).astype(np.float32)
        return (q * d - d * blocks[..., 2:4].copy().view(np.uint16)).reshape(len(rows), -1)
    scale, data = blocks[..., :4].copy().view(np.float32), blocks[..., 4:]
    return (scale * (E4M3[data] if fmt.name == "F8_E4M3" else data.view(np.int8))).reshape(len(rows), -1)


def dequantize(fmt: Format, rows: np.ndarray, cols: int) -> np.ndarray:
    """float32 [rows, cols] by the gguf package, or from the definition."""
    if fmt.name not in GGMLQuantizationType.__members__:
        return _own_formats(fmt, rows)[:, :cols]
    typed = rows.view({"F32": np.float32, "F16": np.float16}.get(fmt.name, np.uint8))
    return quants.dequantize(typed, GGMLQuantizationType[fmt.name])[:, :cols]


def pack_weights(k: Kernels, fmt: Format, rows: np.ndarray, cols: int) -> np.ndarray:
    """The compute layout of a file's rows, by the pack kernel."""
    out = aligned(fmt.matrix_nbytes(len(rows), cols))
    run(
        k.pack_weights(fmt), PackWeights, -(-len(rows) // ROWS), src=rows, dst=out, zeros=np.zeros(256, np.uint8),
        rows=len(rows), row_stride=rows.shape[1], row_step=ROWS, dst_stride=fmt.group_nbytes(cols),
        blocks=rows.shape[1] // fmt.block_nbytes, steps=-(-cols // fmt.step),
    )  # fmt: skip
    assert intact(out)
    return out


def gather_rows(k: Kernels, fmt: Format, w: np.ndarray, ids: np.ndarray, cols: int) -> np.ndarray:
    """float32 [len(ids), cols] by the look-up kernel."""
    out = floats(len(ids), cols + 3, fill=7.0)
    run(
        k.gather_rows(fmt), GatherRows, len(ids), w=w, ids=np.ascontiguousarray(ids, np.int32), out=out,
        steps=-(-cols // fmt.step), columns=cols, out_stride=4 * (cols + 3),
    )  # fmt: skip
    assert (out[:, cols:] == 7.0).all()
    return out[:, :cols]


# ---- activations
@dataclass(frozen=True)
class Packed:
    """Tokens in an activation layout: `tokens` of them in tiles of 8 and a tail."""

    data: np.ndarray
    act: Activations
    tokens: int
    blocks: int

    @property
    def tiles(self) -> dict[str, int]:
        """The descriptor fields that count tiles."""
        full, tail = tile_counts(self.tokens)
        return {"full_tiles": full, "tail_tile": tail}

    def unpack(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(values [padded, blocks, 32], scales [padded, blocks], negated sums [padded, blocks, 3]), as stored."""
        full, tail = tile_counts(self.tokens)
        values, scales, sums, at = [], [], [], 0
        for size in [8] * full + [tail] * (tail > 0):
            n = size * self.act.token_nbytes
            tile = self.data[at : at + n * self.blocks].reshape(self.blocks, n)
            at += n * self.blocks
            width = 32 * (1 if self.act is INT8 else 4)
            head, rest = tile[:, : size * width], np.ascontiguousarray(tile[:, size * width :]).view(np.float32)
            head = np.ascontiguousarray(head).view(np.int8 if self.act is INT8 else np.float32)
            rest = rest.reshape(self.blocks, -1, size)
            values.append(head.reshape(self.blocks, size, 32).swapaxes(0, 1))
            scales.append((rest[:, 0] if self.act is INT8 else np.ones((self.blocks, size), np.float32)).T)
            sums.append(rest[:, -3:].transpose(2, 0, 1))
        return np.concatenate(values), np.concatenate(scales), np.concatenate(sums)

    def floats(self) -> np.ndarray:
        """float64 [tokens, 32·blocks]: what the packed tokens stand for."""
        values, scales, _ = self.unpack()
        return (values * scales[..., None].astype(np.float64)).reshape(len(values), -1)[: self.tokens]


def pack_tokens(
    k: Kernels, act: Activations, x: np.ndarray, blocks: int, tokens: int | None = None, **fields: Any
) -> Packed:
    """Rows of x in the activation layout; further descriptor fields as given."""
    n = len(x) if tokens is None else tokens
    out = aligned(act.nbytes(n, blocks))
    full, tail = tile_counts(n)
    given = {
        "src": x, "out": out, "src_stride": x.strides[0], "columns": x.shape[1], "x_blocks": blocks, "tokens": n,
        "full_tiles": full, "tail_tile": tail, "tiles_per_batch": full + (tail > 0),
    }  # fmt: skip
    run(k.pack_tokens(act), PackTokens, full + (tail > 0), **(given | fields))
    assert intact(out)
    return Packed(out, act, n, blocks)


def int8_blocks(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int8 q [T, blocks, 32], float32 d [T, blocks]): q = round(x·127/max|x|), d = max|x|/127; tiny blocks: 0."""
    padded = np.zeros((len(x), -(-x.shape[1] // 32) * 32), np.float32)
    padded[:, : x.shape[1]] = x
    blocks = padded.reshape(len(x), -1, 32)
    amax = np.abs(blocks).max(-1)
    live = amax >= np.float32(1e-30)
    inverse = np.where(live, np.float32(127) / np.where(live, amax, 1), 0).astype(np.float32)
    q = np.rint(blocks * inverse[..., None]).astype(np.int8)
    return q, np.where(live, amax * np.float32(1 / 127), 0).astype(np.float32)


def rounded_activations(act: Activations, x: np.ndarray) -> np.ndarray:
    """float64 [T, K]: the activations that the dot product sees."""
    if act is not INT8:
        return x.astype(np.float64)
    q, d = int8_blocks(x)
    return (q * d[..., None].astype(np.float64)).reshape(len(x), -1)[:, : x.shape[1]]


# ---- products
@dataclass(frozen=True)
class Weights:
    """A matrix in both layouts, and its values in float64 [rows, cols]."""

    fmt: Format
    rows: int
    cols: int
    packed: np.ndarray
    values: np.ndarray

    @property
    def steps(self) -> int:
        return -(-self.cols // self.fmt.step)

    @property
    def blocks(self) -> int:
        """Activation blocks that a product reads."""
        return self.steps * self.fmt.step // 32

    @property
    def groups(self) -> int:
        return -(-self.rows // ROWS)


def weights_of(k: Kernels, fmt: Format, data: np.ndarray, cols: int) -> Weights:
    values = dequantize(fmt, data, cols).astype(np.float64)
    return Weights(fmt, len(data), cols, pack_weights(k, fmt, data, cols), values)


def matmul(
    k: Kernels, w: Weights, mode: str, x: np.ndarray, *, bias: np.ndarray | None = None, into: np.ndarray | None = None,
    chunk: int = 2,
) -> np.ndarray:  # fmt: skip
    """float32 [tokens, rows]: w·x (+ bias) (+ into), in chunks of `chunk` row groups."""
    act = activations_for(w.fmt, mode)
    packed = pack_tokens(k, act, x, w.blocks)
    y = floats(padded_tokens(len(x)), ROWS * w.groups, fill=3.0)
    padded_bias = floats(ROWS * w.groups)
    if bias is not None:
        padded_bias[: w.rows] = bias
    if into is not None:
        y[: len(x), : w.rows] = into
    tasks = -(-w.groups // chunk)
    run(
        k.matmul(w.fmt, act), Matmul, tasks, w=w.packed, x=packed.data, y=y, bias=0 if bias is None else padded_bias,
        groups=w.groups, steps=w.steps, x_blocks=w.blocks, y_stride=y.strides[0], accumulate=into is not None,
        chunk=chunk, tasks_per_batch=tasks, **packed.tiles,
    )  # fmt: skip
    assert intact(y)
    return y[: len(x), : w.rows]


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference relative to the largest value wanted."""
    assert np.isfinite(got).all()
    return float(np.abs(got - want).max() / np.abs(want).max())
