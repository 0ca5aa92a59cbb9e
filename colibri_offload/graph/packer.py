"""From a file's rows to the compute layout, natively: matrices, vectors, expert records; and back to float32."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from colibri_offload.graph.layout import ExpertLayout, MatrixLayout, VectorLayout
from colibri_offload.jit.emit import Struct
from colibri_offload.jit.formats import ROWS, Format, get_format
from colibri_offload.jit.kernels import Kernels
from colibri_offload.jit.kernels.pack import PackWeights
from colibri_offload.jit.kernels.rows import GatherRows


def aligned(nbytes: int, alignment: int = 64) -> np.ndarray:
    """Zeroed uint8 [nbytes] at an aligned address."""
    raw = np.zeros(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


class Packer:
    """Packs in the calling thread, with the GIL released: reader threads pack while workers compute."""

    def __init__(self, kernels: Kernels):
        self._kernels = kernels
        self._zeros = np.zeros(256, np.uint8)

    def _run(self, fn: int, args: np.ndarray, tasks: int) -> None:
        self._kernels.run(fn, args.ctypes.data, tasks)

    def _pack_rows(
        self, fmt: Format, rows: np.ndarray, cols: int, dst: int, *, first: int = 0, row_step: int = ROWS,
        dst_stride: int | None = None,
    ) -> None:  # fmt: skip
        """Groups of 16 rows starting at `first`, `row_step` apart, to dst, dst_stride apart."""
        args = _descriptor(
            PackWeights,
            src=rows.ctypes.data + first * rows.strides[0],
            dst=dst,
            zeros=self._zeros.ctypes.data,
            rows=len(rows) - first,
            row_stride=rows.strides[0],
            row_step=row_step,
            dst_stride=fmt.group_nbytes(cols) if dst_stride is None else dst_stride,
            blocks=-(-cols // fmt.block_elements),
            steps=-(-cols // fmt.step),
        )
        self._run(self._kernels.pack_weights(fmt), args, -(-(len(rows) - first) // row_step))

    def matrix(self, layout: MatrixLayout, rows: np.ndarray, dst: int) -> None:
        """uint8 [rows, row_nbytes] or [batches, rows, row_nbytes] → the compute layout at address dst."""
        batches = rows.reshape(layout.batches, layout.rows, -1)
        for b, one in enumerate(batches):
            one = one if one.strides[1] == 1 else np.ascontiguousarray(one)
            self._pack_rows(layout.fmt, one, layout.cols, dst + b * layout.batch_nbytes)

    def vector(self, layout: VectorLayout, values: np.ndarray, dst: int) -> None:
        """float32 [size] → padded at address dst."""
        out = _at(dst, layout.nbytes).view(np.float32)
        out[: layout.size], out[layout.size :] = values, 0.0

    def expert(self, layout: ExpertLayout, parts: Mapping[str, np.ndarray], out: memoryview) -> None:
        """parts: "gate", "up", "down" as rows, "gate.bias" … as float32 → the record in `out`."""
        base = np.frombuffer(out, np.uint8)
        dst = base.ctypes.data
        stride = 2 * (layout.gate_group + layout.up_group)
        intermediate = layout.hidden_blocks * 32
        for name, fmt, group, at in (
            ("gate", layout.gate, layout.gate_group, 0),
            ("up", layout.up, layout.up_group, 2 * layout.gate_group),
        ):
            rows = np.ascontiguousarray(parts[name])
            if intermediate - len(rows) >= ROWS:  # the last block's second group has no rows: let it be packed as zeros
                rows = np.concatenate([rows, np.zeros((intermediate - len(rows), rows.shape[1]), np.uint8)])
            for half in range(2):
                self._pack_rows(
                    fmt, rows, layout.hidden, dst + at + half * group, first=half * ROWS, row_step=32, dst_stride=stride
                )
        self._pack_rows(layout.down, np.ascontiguousarray(parts["down"]), layout.intermediate, dst + layout.down_at)
        if layout.bias:
            biases = base[layout.bias_at : layout.nbytes].view(np.float32)
            biases[:] = 0.0
            for name, at in (("gate", 0), ("up", intermediate), ("down", 2 * intermediate)):
                values = parts[f"{name}.bias"]
                biases[at : at + len(values)] = values

    def float32(self, fmt_name: str, rows: np.ndarray, cols: int) -> np.ndarray:
        """uint8 [..., row_nbytes] → float32 [..., cols], exactly as the kernels understand the format."""
        fmt = get_format(fmt_name)
        flat = np.ascontiguousarray(rows).reshape(-1, rows.shape[-1])
        if fmt_name == "F32":
            return flat.view(np.float32).reshape(*rows.shape[:-1], cols)
        out = np.empty((len(flat), cols), np.float32)
        packed = aligned(fmt.matrix_nbytes(ROWS * 64, cols))
        fn = self._kernels.gather_rows(fmt)
        for start in range(0, len(flat), ROWS * 64):
            part = flat[start : start + ROWS * 64]
            self._pack_rows(fmt, part, cols, packed.ctypes.data)
            ids = np.arange(len(part), dtype=np.int32)
            args = _descriptor(
                GatherRows,
                w=packed.ctypes.data,
                ids=ids.ctypes.data,
                out=out[start:].ctypes.data,
                steps=-(-cols // fmt.step),
                columns=cols,
                out_stride=4 * cols,
            )
            self._run(fn, args, len(part))
        return out.reshape(*rows.shape[:-1], cols)


def _descriptor(struct: Struct, **fields: int) -> np.ndarray:
    args = struct.new()
    for name, value in fields.items():
        args[name] = value
    return args


def _at(address: int, nbytes: int) -> np.ndarray:
    """The memory at an address as uint8 [nbytes]; the caller keeps it alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
