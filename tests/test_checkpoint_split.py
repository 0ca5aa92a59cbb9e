"""Split GGUF: any shard opens the model; missing, renamed and mixed shards are named."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from checkpoint_writers import STRING, U16, U32, gguf_bytes, key_value, tensor_info, text

from colibri_offload.checkpoint.gguf import GgufCheckpoint
from colibri_offload.errors import CheckpointError


def shard(no: int, count: int, names: list[str], total: int, extra: Sequence[bytes] = ()) -> bytes:
    values = [
        *extra,
        key_value("split.no", U16, struct.pack("<H", no)),
        key_value("split.count", U16, struct.pack("<H", count)),
        key_value("split.tensors.count", U32, struct.pack("<I", total)),
    ]
    infos = [tensor_info(name, [8], 0, 32 * i) for i, name in enumerate(names)]
    data = b"".join(np.full(8, ord(name), np.float32).tobytes() for name in names)
    return gguf_bytes(values, infos, data)


@pytest.fixture
def model(tmp_path: Path) -> list[Path]:
    """Three shards; the first holds only metadata, as llama.cpp's --no-tensor-first-split writes it."""
    paths = [tmp_path / f"my model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    paths[0].write_bytes(shard(0, 3, [], 3, [key_value("general.architecture", STRING, text("tiny"))]))
    paths[1].write_bytes(shard(1, 3, ["a", "b"], 3))
    paths[2].write_bytes(shard(2, 3, ["c"], 3))
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_shard_opens_the_whole(model: list[Path], given: int) -> None:
    checkpoint = GgufCheckpoint(model[given])
    assert checkpoint.files == tuple(model)
    assert checkpoint.metadata["general.architecture"] == "tiny"
    values = {name: t.read().view(np.float32)[0] for name, t in checkpoint.tensors.items()}
    assert values == {"a": 97.0, "b": 98.0, "c": 99.0}


def test_missing_shard_is_named(model: list[Path]) -> None:
    model[2].unlink()
    with pytest.raises(CheckpointError, match=r"my model-00003-of-00003\.gguf: part 3 of 3"):
        GgufCheckpoint(model[0])


def test_renamed_shard(model: list[Path]) -> None:
    renamed = model[0].rename(model[0].with_name("model.gguf"))
    with pytest.raises(CheckpointError, match="restore the original names"):
        GgufCheckpoint(renamed)


def test_swapped_shards(model: list[Path]) -> None:
    second, third = model[1].read_bytes(), model[2].read_bytes()
    model[1].write_bytes(third)
    model[2].write_bytes(second)
    with pytest.raises(CheckpointError, match=r"00002-of-00003.gguf: says that it is part 2 \(from 0\) of 3"):
        GgufCheckpoint(model[0])


def test_shard_of_another_model(model: list[Path]) -> None:
    model[2].write_bytes(shard(2, 3, ["c", "d"], 4))
    with pytest.raises(CheckpointError, match=r"has 3 tensors, its 3 file\(s\) hold 4"):
        GgufCheckpoint(model[0])


def test_tensor_in_two_shards(model: list[Path]) -> None:
    model[2].write_bytes(shard(2, 3, ["a"], 3))
    with pytest.raises(CheckpointError, match="'a' is also in my model-00002"):
        GgufCheckpoint(model[1])


def test_split_count_of_the_wrong_type(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([key_value("split.count", STRING, text("3"))]))
    with pytest.raises(CheckpointError, match=r"split\.count is '3'"):
        GgufCheckpoint(path)
