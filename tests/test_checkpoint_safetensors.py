"""safetensors reader: round trips with the safetensors package as the writer, shards, and every kind of damage."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from checkpoint_writers import entry, hub, hub_typed, safetensors_bytes
from safetensors.numpy import save_file

from colibri_offload.checkpoint.hub_types import F8_TABLES
from colibri_offload.checkpoint.safetensors import HubCheckpoint
from colibri_offload.errors import CheckpointError, ColibriError, UnsupportedError

TENSORS: dict[str, np.ndarray] = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "h": np.arange(6, dtype=np.float16).reshape(2, 3),
    "d": np.array([[1.5, 1e-3]], np.float64),
    "i": np.arange(4, dtype=np.int64),
    "scalar": np.array(2.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "ünïcode": np.arange(3, dtype=np.int8),
}


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    folder = hub(tmp_path / "mit Leerzeichen 蜂鳥", TENSORS, {"model_type": "tiny"})
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    model = HubCheckpoint(folder)
    assert model.kind == "safetensors" and model.files == (folder / "model.safetensors",)
    assert model.metadata == {"model_type": "tiny", "generation_config": {"eos_token_id": 7}}
    assert {n: t.shape for n, t in model.tensors.items()} == {n: a.shape for n, a in TENSORS.items()}
    assert {n: t.fmt for n, t in model.tensors.items()} == {
        "w": "F32", "h": "F16", "d": "F32", "i": "I64", "scalar": "F32", "empty": "F32", "ünïcode": "I8"
    }  # fmt: skip
    for name, array in TENSORS.items():
        wanted = array.astype(np.float32) if name == "d" else array
        got = model.tensors[name].read()
        assert got.dtype == np.uint8 and got.tobytes() == wanted.tobytes()
    assert np.array_equal(model.tensors["w"].index(1).read().view(np.float32), TENSORS["w"][1])


def test_single_file_given_directly(tmp_path: Path) -> None:
    folder = hub(tmp_path, {"w": TENSORS["w"]})
    assert list(HubCheckpoint(folder / "model.safetensors").tensors) == ["w"]


def float8(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The definition of arXiv:2209.05433, table 1, bit by bit."""
    bias = (1 << exponent_bits - 1) - 1
    sign = -1.0 if code >> 7 else 1.0
    exponent, mantissa = (code & 127) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if exponent_bits == 5 and exponent == 31:
        return sign * float("inf") if mantissa == 0 else float("nan")
    if exponent_bits == 4 and code & 127 == 127:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


@pytest.mark.parametrize(("dtype", "bits"), [("F8_E4M3", (4, 3)), ("F8_E5M2", (5, 2))])
def test_float8_decodes_every_code(tmp_path: Path, dtype: str, bits: tuple[int, int]) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 8, 16)
    model = HubCheckpoint(hub_typed(tmp_path, {"x": (dtype, codes)}))
    tensor = model.tensors["x"]
    wanted = np.array([float8(c, *bits) for c in range(256)], np.float32).reshape(2, 8, 16)
    assert tensor.fmt == "F32"
    np.testing.assert_array_equal(tensor.read().view(np.float32), wanted)
    one = tensor.index(1)
    assert one.nbytes == 128
    np.testing.assert_array_equal(one.read().view(np.float32), wanted[1])


def test_e8m0_is_a_power_of_two() -> None:
    table = F8_TABLES["F8_E8M0"]
    assert table[127] == 1 and table[0] == 2.0**-127 and table[254] == 2.0**127 and np.isnan(table[255])


def write_sharded(folder: Path, index: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for i, name in enumerate(names):
        save_file({f"t{i}": np.full((2, 2), i, np.float32)}, folder / name)
    if index:
        weight_map = {f"t{i}": name for i, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("shard", [None, 2])
def test_shards_with_and_without_index(tmp_path: Path, index: bool, shard: int | None) -> None:
    folder = write_sharded(tmp_path / "m", index)
    model = HubCheckpoint(folder if shard is None else folder / f"model-0000{shard}-of-00003.safetensors")
    assert {n: t.read().view(np.float32)[1, 1] for n, t in model.tensors.items()} == {"t0": 0, "t1": 1, "t2": 2}
    assert len(model.files) == 3


@pytest.mark.parametrize("index", [True, False])
def test_missing_shard_is_named(tmp_path: Path, index: bool) -> None:
    folder = write_sharded(tmp_path / "m", index)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors: .*missing"):
        HubCheckpoint(folder)


def test_tensor_that_the_index_promises_is_absent(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m")
    save_file({"other": np.zeros((2, 2), np.float32)}, folder / "model-00002-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors: lacks the tensor 't1'"):
        HubCheckpoint(folder)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "a\\b", "", "..", 7, None])
def test_index_cannot_name_files_elsewhere(tmp_path: Path, file: object) -> None:
    folder = write_sharded(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t0": file}}))
    with pytest.raises(CheckpointError, match=r"'t0' in .*, not a file's name"):
        HubCheckpoint(folder)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_index_without_a_weight_map(tmp_path: Path, weight_map: object) -> None:
    folder = write_sharded(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="weight_map"):
        HubCheckpoint(folder)


def test_duplicate_tensor_in_two_files(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"t": np.zeros((2, 2), np.float32)}, folder / name)
    with pytest.raises(CheckpointError, match=r"b.safetensors: tensor 't' is also in a.safetensors"):
        HubCheckpoint(folder)


ONE = {"a": entry("F32", [2], 0, 8)}
DATA = b"\1" * 8
DAMAGED = {
    "empty": (b"", "fewer than the 8"),
    "length beyond the file": (safetensors_bytes(ONE, DATA, length=1 << 60), f"header of {1 << 60} bytes"),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    "garbage": (safetensors_bytes(b"{]", DATA), "JSON is broken"),
    "not UTF-8": (safetensors_bytes(b'{"\xff": 1}', DATA), "JSON is broken"),
    "array": (safetensors_bytes(b"[]", DATA), "a list, not an object"),
    "deep nesting": (safetensors_bytes(b"[" * 200_000, DATA), "nested too deeply"),
    "number of 5000 digits": (safetensors_bytes(b'{"a": ' + b"9" * 5000 + b"}", DATA), "JSON is broken"),
    "duplicate key": (safetensors_bytes(b'{"a": {}, "a": {}}', DATA), "'a' occurs twice"),
    "entry is no object": (safetensors_bytes({"a": 7}, DATA), "described by 7"),
    "entry lacks shape": (safetensors_bytes({"a": {"dtype": "F32"}}, DATA), "instead of dtype, shape"),
    "unknown dtype": (safetensors_bytes({"a": entry("F4", [2], 0, 8)}, DATA), "'F4'"),
    "dtype of wrong kind": (safetensors_bytes({"a": {**ONE["a"], "dtype": ["F32"]}}, DATA), "has the type"),
    "negative dim": (safetensors_bytes({"a": entry("F32", [-2], 0, 8)}, DATA), "impossible shape"),
    "boolean dim": (safetensors_bytes({"a": {**ONE["a"], "shape": [True, 2]}}, DATA), "impossible shape"),
    "huge dim": (safetensors_bytes({"a": entry("F32", [10**4000], 0, 8)}, DATA), "impossible shape"),
    "huge product": (safetensors_bytes({"a": entry("F32", [1 << 62] * 8, 0, 8)}, DATA), "beyond 2^128"),
    "hundred dims": (safetensors_bytes({"a": entry("F32", [1] * 100, 0, 8)}, DATA), "impossible shape"),
    "offsets outside": (safetensors_bytes({"a": entry("F32", [3], 0, 12)}, DATA), "the offsets [0, 12] in 8 bytes"),
    "offsets reversed": (safetensors_bytes({"a": entry("F32", [2], 8, 0)}, DATA), "the offsets [8, 0]"),
    "three offsets": (safetensors_bytes({"a": {**ONE["a"], "data_offsets": [0, 4, 8]}}, DATA), "the offsets"),
    "shape and bytes disagree": (safetensors_bytes({"a": entry("F32", [3], 0, 8)}, DATA), "takes 12"),
    "overlap": (
        safetensors_bytes({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, DATA),
        "'b' overlaps 'a'",
    ),
    "hole": (safetensors_bytes({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, DATA * 2), "hole of 4"),
    "hole before the first": (
        safetensors_bytes({"a": entry("F32", [1], 4, 8)}, DATA),
        "hole of 4 bytes after the header",
    ),
    "bytes left over": (safetensors_bytes(ONE, DATA + b"x"), "1 bytes at the end"),
    "data cut off": (safetensors_bytes(ONE, DATA[:-1]), "the offsets [0, 8] in 7 bytes"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named_in_one_line_without_allocating(tmp_path: Path, case: str) -> None:
    raw, message = DAMAGED[case]
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises((CheckpointError, UnsupportedError)) as caught:
            HubCheckpoint(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    line = str(caught.value)
    assert message in line and str(path) in line and "\n" not in line and len(line) < 400 + len(str(path))
    assert peak < 16 << 20


def test_truncation_at_every_byte_is_noticed(tmp_path: Path) -> None:
    folder = hub(tmp_path, {"a": np.ones((2, 2), np.float32), "b": np.ones(3, np.float16)})
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ColibriError):
            HubCheckpoint(folder)


def test_zero_filled_tail(tmp_path: Path) -> None:
    """An interrupted download begins its zeros inside a tensor; a model's own zeros begin at a tensor's start."""
    folder = hub(tmp_path, {f"t{i}": np.ones((64, 1024), np.float32) for i in range(3)})
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    one = 64 * 1024 * 4
    path.write_bytes(whole[: -one - 9999] + b"\0" * (one + 9999))
    with pytest.raises(CheckpointError, match="'t2' and all after it are zeros"):
        HubCheckpoint(folder)
    path.write_bytes(whole[:-one] + b"\0" * one)
    assert len(HubCheckpoint(folder).tensors) == 3
    path.write_bytes(whole[: -one - 100] + b"\0" * (one + 100))  # a few zeros before it happen to be there
    assert len(HubCheckpoint(folder).tensors) == 3
    path.write_bytes(whole[: -one // 2] + b"\0" * (one // 2))  # padded rows of a vocabulary
    assert len(HubCheckpoint(folder).tensors) == 3


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b'{"a": 1, "a": 2}', b"[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_config(tmp_path: Path, name: str, raw: bytes) -> None:
    folder = hub(tmp_path, {"w": TENSORS["w"]})
    (folder / name).write_bytes(raw)
    with pytest.raises(CheckpointError, match=name):
        HubCheckpoint(folder)


def test_header_length_is_checked_before_it_is_read(tmp_path: Path) -> None:
    """A sparse file can be as long as its header claims: the library's own limit applies."""
    folder = hub(tmp_path, {"w": TENSORS["w"]})
    path = folder / "model.safetensors"
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", 1 << 38) + b"{}")
        f.truncate(1 << 39)
    with pytest.raises(CheckpointError, match="claims a header"):
        HubCheckpoint(folder)
