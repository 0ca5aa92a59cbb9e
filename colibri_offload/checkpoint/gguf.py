"""GGUF checkpoints, in one file or split over several (`NAME-00001-of-00003.gguf`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colibri_offload.checkpoint.base import Checkpoint, Tensor
from colibri_offload.checkpoint.files import shown
from colibri_offload.checkpoint.gguf_file import GgufFile, read_gguf_file
from colibri_offload.errors import CheckpointError

SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<no>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


class GgufCheckpoint(Checkpoint):
    """A GGUF model. `path` may be any shard of a split one; the metadata is the first shard's.

    Shapes are in NumPy order (rows first: ggml's dimensions reversed). Raises CheckpointError, UnsupportedError.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        given = read_gguf_file(self.path)
        shards = _shards(given)
        self.files = tuple(s.path for s in shards)
        self.tensors: Mapping[str, Tensor] = _merged(shards)
        self._metadata = shards[0].metadata

    @property
    def kind(self) -> str:
        return "gguf"

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._metadata


def _shards(given: GgufFile) -> list[GgufFile]:
    """All files of the model to which `given` belongs, in order."""
    count = _integer(given, "split.count", 1)
    if count <= 1:
        return [given]
    match = SHARD_NAME.fullmatch(given.path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{given.path}: is one of {count} parts of a split model, but its name does not end in "
            f"-NNNNN-of-{count:05d}.gguf, by which the others are found; restore the original names"
        )
    # Names count from 1, split.no from 0.
    paths = [given.path.with_name(f"{match['stem']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    for i, path in enumerate(paths):
        if not path.is_file():
            raise CheckpointError(
                f"{path}: part {i + 1} of {count} of the model is missing; download it to this folder"
            )
    shards = [given if path == given.path else read_gguf_file(path) for path in paths]
    for i, shard in enumerate(shards):
        if _integer(shard, "split.no", -1) != i or _integer(shard, "split.count", -1) != count:
            raise CheckpointError(
                f"{shard.path}: says that it is part {shown(shard.metadata.get('split.no'))} (from 0) of "
                f"{shown(shard.metadata.get('split.count'))}, its name says {i} of {count}; download the parts again"
            )
    return shards


def _merged(shards: list[GgufFile]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for shard in shards:
        for name, tensor in shard.tensors.items():
            if name in out:
                other = out[name].slices[0].path.name
                raise CheckpointError(f"{shard.path}: tensor {shown(name)} is also in {other}; download both again")
            out[name] = tensor
    for shard in shards:
        expected = _integer(shard, "split.tensors.count", len(out))
        if expected != len(out):
            raise CheckpointError(
                f"{shard.path}: says that the model has {expected} tensors, its {len(shards)} file(s) hold {len(out)}; "
                "download all parts of the same version again"
            )
    return out


def _integer(file: GgufFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int:
        raise CheckpointError(f"{file.path}: {key} is {shown(value)}, not an integer; download it again")
    return value
