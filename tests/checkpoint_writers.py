"""Writers of small model files for the reader tests: correct ones, and ones with any field set to a lie."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Stored = Mapping[str, tuple[str, Any]]  # name → (safetensors dtype, array of the same bytes)

U8, U16, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 2, 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key_value(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def tensor_info(name: str | bytes, dims: list[int], type_id: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def gguf_bytes(
    values: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    n_tensors: int | None = None,
    n_values: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file from its parts; the counts default to the truth."""
    head = b"GGUF" + struct.pack("<I", version)
    head += struct.pack(
        "<QQ", len(infos) if n_tensors is None else n_tensors, len(values) if n_values is None else n_values
    )
    head += b"".join(values) + b"".join(infos)
    return head + b"\0" * (-len(head) % alignment) + data


def safetensors_bytes(header: dict[str, Any] | bytes, data: bytes, *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def hub(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any] | None = None) -> Path:
    """A hub directory with one file, written by the safetensors library."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def hub_typed(folder: Path, tensors: Stored, config: dict[str, Any] | None = None) -> Path:
    """As `hub`, for types that NumPy lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}), encoding="utf-8")
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        header[name] = entry(dtype, list(array.shape), len(data), len(data) + array.nbytes)
        data += array.tobytes()
    (folder / "model.safetensors").write_bytes(safetensors_bytes(header, data))
    return folder
