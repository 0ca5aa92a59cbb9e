"""GGUF reader: round trips with the gguf package as the writer, and every kind of damage named in one line."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoint_writers import ARRAY, BOOL, F32, STRING, U8, U16, U32, gguf_bytes, key_value, tensor_info, text

from colibri_offload.checkpoint.ggml_types import GGML_TYPES
from colibri_offload.checkpoint.gguf import GgufCheckpoint
from colibri_offload.errors import CheckpointError, ColibriError, UnsupportedError


def write_model(path: Path) -> dict[str, np.ndarray]:
    """A small file by the gguf package; returns the float32 tensors that went in."""
    rng = np.random.default_rng(1)
    tensors = {
        "token_embd.weight": rng.standard_normal((7, 64), np.float32),
        "blk.0.ffn_up_exps.weight": rng.standard_normal((3, 5, 64), np.float32),
        "blk.0.attn_norm.weight": rng.standard_normal(64, np.float32),
    }
    writer = gguf.GGUFWriter(path, "tiny")
    writer.add_uint32("tiny.block_count", 1)
    writer.add_float32("tiny.eps", 0.5)
    writer.add_bool("tiny.flag", True)
    writer.add_string("general.name", "Kolibri — 蜂鳥")
    writer.add_array("tokenizer.ggml.tokens", ["a", "", "é"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 0.0])
    writer.add_array("tiny.layers", [1, 2, 3])
    for name, array in tensors.items():
        if name.startswith("blk.0.ffn"):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "mit Leerzeichen ü.gguf"
    tensors = write_model(path)
    model = GgufCheckpoint(path)
    assert model.kind == "gguf" and model.files == (path,)
    meta = model.metadata
    assert meta["general.architecture"] == "tiny" and meta["general.name"] == "Kolibri — 蜂鳥"
    assert meta["tiny.block_count"] == 1 and meta["tiny.eps"] == 0.5 and meta["tiny.flag"] is True
    assert meta["tokenizer.ggml.tokens"] == ["a", "", "é"] and meta["tokenizer.ggml.scores"] == [0.5, -1.0, 0.0]
    assert meta["tiny.layers"] == [1, 2, 3]
    assert {n: t.shape for n, t in model.tensors.items()} == {n: a.shape for n, a in tensors.items()}
    embed = model.tensors["token_embd.weight"]
    assert embed.fmt == "F32" and np.array_equal(embed.read().view(np.float32), tensors["token_embd.weight"])


def test_index_reads_only_its_own_expert(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tensors = write_model(path)
    experts = GgufCheckpoint(path).tensors["blk.0.ffn_up_exps.weight"]
    assert experts.fmt == "Q8_0" and experts.shape == (3, 5, 64)
    one = experts.index(2)
    assert one.shape == (5, 64) and one.nbytes * 3 == experts.nbytes
    values = gguf.quants.dequantize(one.read(), gguf.GGMLQuantizationType.Q8_0)
    assert np.abs(values - tensors["blk.0.ffn_up_exps.weight"][2]).max() < 0.02
    with pytest.raises(IndexError):
        experts.index(3)


@pytest.mark.parametrize("kind", list(gguf.GGMLQuantizationType), ids=lambda k: k.name)
def test_block_sizes_agree_with_the_gguf_package(kind: gguf.GGMLQuantizationType) -> None:
    ours = GGML_TYPES[kind.value]
    if kind.name == "Q8_1":  # the package still has the layout before ggml made its two scales half precision
        assert (ours.block_elements, ours.block_nbytes) == (32, 36)
    else:
        assert (ours.name, (ours.block_elements, ours.block_nbytes)) == (kind.name, gguf.GGML_QUANT_SIZES[kind])


def test_strings_across_the_read_window_and_odd_bytes(tmp_path: Path) -> None:
    words = ["x" * (i % 37) for i in range(150_000)]
    array = struct.pack("<IQ", STRING, len(words) + 1) + b"".join(map(text, words)) + text(b"\xff\xfe")
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([key_value("words", ARRAY, array), key_value("name", STRING, text(b"a\xffb"))]))
    meta = GgufCheckpoint(path).metadata
    assert meta["words"][:-1] == words
    assert meta["words"][-1].encode("utf-8", "surrogateescape") == b"\xff\xfe"
    assert meta["name"] == "a�b"


def test_version_2_and_custom_alignment(tmp_path: Path) -> None:
    data = np.arange(8, dtype=np.float32).tobytes()
    values = [key_value("general.alignment", U32, struct.pack("<I", 64))]
    path = tmp_path / "m.gguf"
    infos = [tensor_info("a", [4, 2], 0, 64)]
    path.write_bytes(gguf_bytes(values, infos, b"\1" * 64 + data, version=2, alignment=64))
    (tensor,) = GgufCheckpoint(path).tensors.values()
    assert tensor.shape == (2, 4)
    assert np.array_equal(tensor.read().view(np.float32).ravel(), np.arange(8))


ROW = b"\7" * 128  # 32 float32
F32_32 = tensor_info("a", [32], 0, 0)
HUGE = 1 << 60

DAMAGED = {
    "magic": (b"PK\3\4" + b"\0" * 60, "not a GGUF file"),
    "empty": (b"", "not a GGUF file"),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    "version 1": (gguf_bytes(version=1), "version 1"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "2^60 tensors": (gguf_bytes(n_tensors=HUGE), f"claims {HUGE} tensors"),
    "2^60 keys": (gguf_bytes(n_values=HUGE), f"claims {HUGE} metadata keys"),
    "2^60 strings": (gguf_bytes([key_value("k", ARRAY, struct.pack("<IQ", STRING, HUGE))]), f"claims {HUGE} items"),
    "2^60 bytes": (gguf_bytes([key_value("k", ARRAY, struct.pack("<IQ", U8, HUGE))]), f"claims {HUGE} items"),
    "2^60 letters": (gguf_bytes([key_value("k", STRING, struct.pack("<Q", HUGE))]), f"{HUGE} bytes of text"),
    "key of 2^60": (gguf_bytes([struct.pack("<Q", HUGE) + b"\0" * 64]), f"length of {HUGE}"),
    "long key": (gguf_bytes([key_value("k" * 70_000, U8, b"\1")]), "length of 70000"),
    "empty key": (gguf_bytes([key_value("", U8, b"\1"), b"\0" * 32], n_values=1), "length of 0"),
    "key not UTF-8": (gguf_bytes([key_value(b"\xff", U8, b"\1")]), "not UTF-8"),
    "key twice": (gguf_bytes([key_value("k", U8, b"\1")] * 2), "'k' occurs twice"),
    "unknown value type": (gguf_bytes([key_value("k", 77, b"\0" * 8)]), "unknown type 77"),
    "nested array": (gguf_bytes([key_value("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + b"\0" * 32)]), "array of arrays"),
    "boolean 2": (gguf_bytes([key_value("k", BOOL, b"\2")]), "boolean"),
    "value cut off": (gguf_bytes([key_value("kkk", U32, b"")])[:40], "claims"),
    "alignment 0": (gguf_bytes([key_value("general.alignment", U32, struct.pack("<I", 0))]), "general.alignment is 0"),
    "alignment 48": (
        gguf_bytes([key_value("general.alignment", U32, struct.pack("<I", 48))]),
        "general.alignment is 48",
    ),
    "alignment text": (gguf_bytes([key_value("general.alignment", STRING, text("32"))]), "general.alignment is '32'"),
    "alignment 2^31": (
        gguf_bytes([key_value("general.alignment", U32, struct.pack("<I", 1 << 31))]),
        "general.alignment",
    ),
    "no dims": (gguf_bytes([], [tensor_info("a", [], 0, 0)], ROW), "0 dimensions"),
    "5 dims": (gguf_bytes([], [tensor_info("a", [1] * 5, 0, 0)], ROW), "5 dimensions"),
    "zero dim": (gguf_bytes([], [tensor_info("a", [32, 0], 0, 0)], ROW), "impossible dimensions"),
    "negative dim": (gguf_bytes([], [tensor_info("a", [32, (1 << 64) - 1], 0, 0)], ROW), "impossible dimensions"),
    "absurd dims": (gguf_bytes([], [tensor_info("a", [1 << 40] * 4, 0, 0)], ROW), "ends at byte"),
    "wrapping dims": (gguf_bytes([], [tensor_info("a", [32, 1 << 32, 1 << 32], 0, 0)], ROW), "ends at byte"),
    "partial block": (
        gguf_bytes([], [tensor_info("a", [33], 2, 0)], ROW),
        "33 elements, not a multiple of the 32 in a Q4_0",
    ),
    "unknown type": (gguf_bytes([], [tensor_info("a", [32], 99, 0)], ROW), "'a' has ggml type 99"),
    "withdrawn type": (gguf_bytes([], [tensor_info("a", [32], 4, 0)], ROW), "Q4_2"),
    "offset outside": (gguf_bytes([], [tensor_info("a", [32], 0, 1 << 20)], ROW), "ends at byte"),
    "offset 2^63": (gguf_bytes([], [tensor_info("a", [32], 0, 1 << 63)], ROW), "ends at byte"),
    "odd offset": (gguf_bytes([], [tensor_info("a", [8], 0, 4)], ROW), "multiple of the alignment"),
    "overlap": (gguf_bytes([], [F32_32, tensor_info("b", [32], 0, 64)], ROW * 2), "'a' and 'b' overlap"),
    "same offset": (gguf_bytes([], [F32_32, tensor_info("b", [32], 0, 0)], ROW * 2), "overlap"),
    "name twice": (gguf_bytes([], [F32_32, F32_32], ROW), "'a' occurs twice"),
    "data cut off": (gguf_bytes([], [F32_32], ROW[:-1]), "ends at byte"),
    "hostile name": (gguf_bytes([], [tensor_info("a\n" + "x" * 60_000, [32], 99, 0)], ROW), "ggml type 99"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named_in_one_line_without_allocating(tmp_path: Path, case: str) -> None:
    raw, message = DAMAGED[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises((CheckpointError, UnsupportedError)) as caught:
            GgufCheckpoint(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    line = str(caught.value)
    assert message in line and str(path) in line and "\n" not in line and len(line) < 400 + len(str(path))
    assert peak < 8 << 20


def test_truncation_at_every_byte_is_noticed(tmp_path: Path) -> None:
    values = [key_value("k", U16, b"\1\0"), key_value("f", F32, b"\0" * 4), key_value("s", STRING, text("abc"))]
    whole = gguf_bytes(values, [F32_32], ROW)
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    assert list(GgufCheckpoint(path).tensors) == ["a"]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ColibriError):
            GgufCheckpoint(path)


def test_metadata_of_a_large_file_is_bounded(tmp_path: Path) -> None:
    """Bug class: a byte array of file size becomes a Python list of thirty times that. The total is capped."""
    path = tmp_path / "model.gguf"
    n = (1 << 24) + 1
    path.write_bytes(gguf_bytes([key_value("k", ARRAY, struct.pack("<IQ", U8, n))]))
    with open(path, "ab") as f:
        f.truncate(path.stat().st_size + n)  # sparse
    with pytest.raises(CheckpointError, match="more than the"):
        GgufCheckpoint(path)


def q8_file(path: Path, blocks: list[bytes]) -> None:
    """One Q8_0 tensor [4096, 32] per entry, 139,264 bytes each."""
    infos = [tensor_info(f"t{i}", [32, 4096], 8, i * 4096 * 34) for i in range(len(blocks))]
    path.write_bytes(gguf_bytes([], infos, b"".join(blocks)))


FULL, ZERO = b"\1" * (4096 * 34), b"\0" * (4096 * 34)


def test_zero_filled_tail_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    q8_file(path, [FULL, FULL[:1000].ljust(len(FULL), b"\0"), ZERO])
    with pytest.raises(CheckpointError, match=r"'t2' and all after it are zeros \(the last \d+ bytes\)"):
        GgufCheckpoint(path)


@pytest.mark.parametrize(
    "blocks",
    [[FULL, FULL], [ZERO, FULL], [FULL, FULL[:60_000].ljust(len(FULL), b"\0")]],
    ids=["full", "zeros inside", "zero rows at the end"],
)
def test_zeros_elsewhere_are_not_a_fault(tmp_path: Path, blocks: list[bytes]) -> None:
    path = tmp_path / "model.gguf"
    q8_file(path, blocks)
    assert len(GgufCheckpoint(path).tensors) == len(blocks)


def test_zero_float_tensor_at_the_end_is_not_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    infos = [tensor_info("a", [32, 1024], 0, 0), tensor_info("b", [32, 1024], 0, 1 << 17)]
    path.write_bytes(gguf_bytes([], infos, b"\1" * (1 << 17) + b"\0" * (1 << 17)))
    assert set(GgufCheckpoint(path).tensors) == {"a", "b"}


def test_a_file_that_shrinks_after_opening_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes([], [F32_32], ROW))
    (tensor,) = GgufCheckpoint(path).tensors.values()
    path.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="truncated"):
        tensor.read()
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        tensor.read()
