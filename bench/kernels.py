"""Roofline of the CPU kernels: GB/s and Gop/s per format and shape, beside the machine's measured ceilings.

    python bench/kernels.py [--threads 1,2] [--formats Q4_0,Q8_0,Q4_K] [--runs 7]

Every kernel's result is checked against float64 before it is timed. The ceilings are measured right before and after
each timing, because they drift on shared machines; a share is the kernel's median over the median of its neighbours.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from statistics import median

import llvmlite.ir as ir
import numpy as np

from colibri_offload.jit.compiler import Compiler
from colibri_offload.jit.emit import Fn, Struct, i32, i64, ptr, vec, void
from colibri_offload.jit.formats import FORMATS, Format
from colibri_offload.jit.kernels import Kernels
from colibri_offload.jit.kernels.activations import Activations, activations_for, padded_tokens, tile_counts
from colibri_offload.jit.kernels.matmul import Matmul
from colibri_offload.jit.kernels.pack import PackTokens
from colibri_offload.jit.kernels.rows import GatherRows
from colibri_offload.jit.pool import WorkerPool
from colibri_offload.jit.program import Program
from colibri_offload.jit.targets import get_target

Stream = Struct("Stream", data=ptr, nbytes=i64, out=ptr)
Spin = Struct("Spin", rounds=i64, out=ptr)
READ_NBYTES, SPIN_ROUNDS, CHAINS = 1 << 29, 20_000, 12


def aligned(nbytes: int) -> np.ndarray:
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


class Ceilings:
    """Read bandwidth (streaming a buffer far larger than the caches) and the integer dot rate (registers only)."""

    def __init__(self, compiler: Compiler, pool: WorkerPool):
        names = ("read", "read_ahead", "dot")
        *reads, dot = compiler.link("bench.ceilings", lambda m: self._emit(compiler, m), *names)
        self._buffer, self._out = aligned(READ_NBYTES), aligned(64 * 256)
        self._buffer[:] = 1
        tasks = 8 * pool.threads
        chunk = READ_NBYTES // tasks // 4096 * 4096
        self._reads = [Program(pool) for _ in reads]
        for program, fn in zip(self._reads, reads, strict=True):
            program.stage()
            program.add(fn, Stream, tasks, data=self._buffer.ctypes.data, nbytes=chunk, out=self._out.ctypes.data)
            program.seal()
        self._read_nbytes = chunk * tasks
        self._dot = Program(pool)
        self._dot.stage()
        self._dot.add(dot, Spin, pool.threads, rounds=SPIN_ROUNDS, out=self._out.ctypes.data)
        self._dot.seal()
        self._dot_ops = pool.threads * SPIN_ROUNDS * CHAINS * compiler.target.lanes * 8

    @staticmethod
    def _emit(compiler: Compiler, m: ir.Module) -> None:
        lanes = compiler.target.lanes
        t, nbytes = vec(i32, lanes), 4 * lanes
        for name, ahead in (("read", 0), ("read_ahead", 8192)):
            with Fn(m, compiler.target, name, {"args": ptr, "task": i64}) as k:
                a = Stream.at(k.args)
                data = a.data + k.task * a.nbytes
                acc = [k.var(k.zero(t)) for _ in range(4)]
                with k.range(0, a.nbytes, 4 * nbytes) as at:
                    for i, v in enumerate(acc):
                        if ahead:
                            hints = (k.const(i32, n) for n in (0, 3, 1))  # read, keep in all caches, data
                            k.target_intrinsic("llvm.prefetch.p0", void, data + (at + ahead + nbytes * i), *hints)
                        v.set(v() + (data + at).load(t, nbytes * i, nbytes))
                (a.out + k.task * 64).store(acc[0]() + acc[1]() + acc[2]() + acc[3](), 0, 4)
        with Fn(m, compiler.target, "dot", {"args": ptr, "task": i64}) as k:
            a = Spin.at(k.args)
            x = (a.out + k.task * 64).load(t, 0, 4).bits(vec(ir.IntType(8), nbytes))
            acc = [k.var(k.const(t, i)) for i in range(CHAINS)]
            with k.range(0, a.rounds):
                for v in acc:
                    v.set(compiler.target.dot4(v(), x, x, False))
            total = acc[0]()
            for v in acc[1:]:
                total = total + v()
            (a.out + k.task * 64).store(total, 0, 4)

    def read_bytes_per_sec(self) -> float:
        """The better of reading plainly and with software prefetch."""
        return max(self._read_nbytes / timed(program.run) for program in self._reads)

    def dot_ops_per_sec(self) -> float:
        """Two operations per multiply-add."""
        return self._dot_ops / timed(self._dot.run)


def timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Product:
    """W [rows, cols] · X [tokens, cols]ᵀ with random weights, checked once. Weights cycle through `copies` of the
    matrix."""

    def __init__(self, kernels: Kernels, pool: WorkerPool, fmt: Format, rows: int, cols: int, tokens: int, copies: int):
        self.act: Activations = activations_for(fmt, "int8")
        self.nbytes, self.ops = fmt.matrix_nbytes(rows, cols) * copies, 2 * rows * cols * tokens * copies
        rng = np.random.default_rng(0)
        self._w = aligned(self.nbytes)
        one = fmt.pack(random_rows(fmt, rng, rows, cols), cols)
        for i in range(copies):
            self._w[i * len(one) : (i + 1) * len(one)] = one
        x = rng.standard_normal((tokens, cols)).astype(np.float32)
        blocks, n = -(-cols // 256) * 8, padded_tokens(tokens)
        full, tail = tile_counts(tokens)
        self._packed, self._y = aligned(self.act.nbytes(tokens, blocks)), np.zeros((n, rows), np.float32)
        pack = Program(pool)
        pack.stage()
        tiles = full + (tail > 0)
        pack.add(
            kernels.pack_tokens(self.act), PackTokens, tiles, src=x.ctypes.data, out=self._packed.ctypes.data,
            src_stride=4 * cols, columns=cols, x_blocks=blocks, tokens=tokens, full_tiles=full, tail_tile=tail,
            tiles_per_batch=tiles,
        )  # fmt: skip
        pack.seal()
        pack.run()
        self._program = Program(pool)
        groups = rows // 16
        chunk = max(1, -(-groups // (pool.threads * 4)))
        per = -(-groups // chunk)
        for i in range(copies):
            self._program.stage()
            self._program.add(
                kernels.matmul(fmt, self.act),
                Matmul,
                per,
                w=self._w.ctypes.data + i * len(one),
                x=self._packed.ctypes.data,
                y=self._y.ctypes.data,
                groups=groups,
                steps=-(-cols // fmt.step),
                x_blocks=blocks,
                full_tiles=full,
                tail_tile=tail,
                y_stride=4 * rows,
                chunk=chunk,
                tasks_per_batch=per,
            )
        self._program.seal()
        self._check(kernels, fmt, one, x, rows, cols)

    def _check(self, kernels: Kernels, fmt: Format, w: np.ndarray, x: np.ndarray, rows: int, cols: int) -> None:
        dense, ids, args = np.zeros((rows, cols), np.float32), np.arange(rows, dtype=np.int32), GatherRows.new()
        packed = aligned(len(w))
        packed[:] = w
        args[0] = (packed.ctypes.data, ids.ctypes.data, dense.ctypes.data, -(-cols // fmt.step), cols, 4 * cols)
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(kernels.gather_rows(fmt))
        for i in range(rows):
            call(args.ctypes.data, i)
        if self.act.name == "int8":
            blocks = x.reshape(len(x), -1, 32)
            d = np.abs(blocks).max(-1, keepdims=True)
            x = (np.rint(blocks * (np.float32(127) / d)) * (d / 127)).reshape(x.shape)
        self.run()
        want = x.astype(np.float64) @ dense.astype(np.float64).T
        error = np.abs(self._y[: len(x)] - want).max() / np.abs(want).max()
        if not error < 1e-5:
            raise SystemExit(f"{fmt.name}: wrong result, relative error {error:.1e}")

    def run(self) -> None:
        self._program.run()


def random_rows(fmt: Format, rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    """Quantised random rows: through the quantiser where there is one, else random bytes with sane scales."""
    if fmt.can_quantize:
        return fmt.quantize(rng.standard_normal((rows, cols)).astype(np.float32) * 0.02)
    b = rng.integers(0, 128, (rows, cols // fmt.block_elements, fmt.block_nbytes), dtype=np.uint8)
    if fmt.name == "F8_E4M3":
        b[..., :4] = np.frombuffer(np.float32(0.001).tobytes(), np.uint8)
        b[..., 4:] %= 0x7F  # no NaN
    scale = np.float16(0.001).tobytes()
    for at in SCALES_AT[fmt.name]:
        b[..., at : at + 2] = np.frombuffer(scale, np.uint8)
    if fmt.name == "MXFP4":
        b[..., 0] = 120
    return b.reshape(rows, -1)


SCALES_AT = {
    "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (), "Q4_Z": (0,), "F8_E4M3": (),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=2048)
    args = parser.parse_args()
    compiler = Compiler(get_target())
    kernels, results = Kernels(compiler), []
    print(f"target {compiler.target!r}; W [{args.rows}, {args.cols}]")
    print("decode: 1 token, weights from memory; prefill: 64 tokens")
    print(f"{'format':8} {'threads':>7} {'decode GB/s':>12} {'share':>6} {'prefill Gop/s':>14} {'share':>6}")
    for threads in map(int, args.threads.split(",")):
        pool = WorkerPool(compiler, threads)
        ceilings = Ceilings(compiler, pool)
        for name in args.formats.split(","):
            fmt = FORMATS[name]
            copies = max(1, (256 << 20) // fmt.matrix_nbytes(args.rows, args.cols))
            decode = Product(kernels, pool, fmt, args.rows, args.cols, 1, copies)
            prefill = Product(kernels, pool, fmt, args.rows, args.cols, 64, 1)
            gbs, reads, ops, dots = [], [], [], []
            for _ in range(args.runs):
                reads.append(ceilings.read_bytes_per_sec())
                gbs.append(decode.nbytes / timed(decode.run))
                dots.append(ceilings.dot_ops_per_sec())
                ops.append(prefill.ops / timed(prefill.run))
            row = {
                "format": name,
                "threads": threads,
                "decode_bytes_per_sec": median(gbs),
                "read_bytes_per_sec": median(reads),
                "prefill_ops_per_sec": median(ops),
                "dot_ops_per_sec": median(dots),
            }
            results.append(row)
            share, dot_share = median(gbs) / median(reads), median(ops) / median(dots)
            gb, gop = median(gbs) / 1e9, median(ops) / 1e9
            print(f"{name:8} {threads:7} {gb:12.1f} {share:6.2f} {gop:14.0f} {dot_share:6.2f}")
        pool.close()
    print(json.dumps({"bench": "kernels", "target": compiler.target.name, "results": results}))


if __name__ == "__main__":
    main()
