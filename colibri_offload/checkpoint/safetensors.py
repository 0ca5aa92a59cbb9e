"""Hugging Face directories: config.json and weights in one or several safetensors files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colibri_offload.checkpoint.base import Checkpoint, Tensor
from colibri_offload.checkpoint.files import read_json, shown
from colibri_offload.checkpoint.hub_quant import fold
from colibri_offload.checkpoint.hub_types import Stored, plain_tensor
from colibri_offload.checkpoint.safetensors_file import read_safetensors_file
from colibri_offload.errors import CheckpointError, UnsupportedError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<no>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors", re.DOTALL)
PICKLES = ("*.bin", "*.pt", "*.pth")


class HubCheckpoint(Checkpoint):
    """A model in the hub's layout: its directory, its single file, or any one of its shards.

    Quantised tensors that are stored in parts appear once, under the name and shape of the unquantised one.
    Raises CheckpointError, UnsupportedError.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        folder = self.path if self.path.is_dir() else self.path.parent
        self._config = _config(folder)
        stored = _directory(folder) if self.path.is_dir() or _is_shard(self.path) else _file(self.path)
        self.files = tuple(dict.fromkeys(s.slice.path for s in stored.values()))
        folded, rest = fold(stored, self._config, folder)
        self.tensors: Mapping[str, Tensor] = {**{s.name: plain_tensor(s) for s in rest}, **folded}

    @property
    def kind(self) -> str:
        return "safetensors"

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._config


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: is missing; put the model's config.json beside its weights")
    config = read_json(path)
    generation = folder / "generation_config.json"
    return {**config, "generation_config": read_json(generation)} if generation.is_file() else config


def _is_shard(path: Path) -> bool:
    return SHARD_NAME.fullmatch(path.name) is not None


def _file(path: Path) -> dict[str, Stored]:
    return read_safetensors_file(path)


def _directory(folder: Path) -> dict[str, Stored]:
    """A directory's tensors: of the single file if there is one, else of the index's shards, else of every file."""
    if (folder / SINGLE).is_file():
        return _file(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _indexed(folder)
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise _no_weights(folder)
    _refuse_missing_shards(paths)
    return _merged(paths, {})


def _indexed(folder: Path) -> dict[str, Stored]:
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: its weight_map is {shown(weight_map)}, not a table of tensors; download it again"
        )
    for name, file in weight_map.items():
        # A shard lies in the same folder: an index from elsewhere must not make us read other files.
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise CheckpointError(
                f"{index}: puts tensor {shown(name)} in {shown(file)}, not a file's name; download it again"
            )
    paths = [folder / file for file in sorted(set(weight_map.values()))]
    for path in paths:
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing, but {INDEX} names it; download it to this folder")
    stored = _merged(paths, weight_map)
    for name, file in weight_map.items():
        if name not in stored or stored[name].slice.path.name != file:
            raise CheckpointError(
                f"{folder / file}: lacks the tensor {shown(name)} that {INDEX} puts there; download both again"
            )
    return stored


def _merged(paths: list[Path], weight_map: Mapping[str, str]) -> dict[str, Stored]:
    """The tensors of all files. Where two hold the same name, the index decides; without its word it is an error."""
    out: dict[str, Stored] = {}
    for path in paths:
        for name, stored in read_safetensors_file(path).items():
            if weight_map.get(name, path.name) != path.name:
                continue
            if name in out:
                other = out[name].slice.path.name
                raise CheckpointError(
                    f"{path}: tensor {shown(name)} is also in {other}; leave only one model's files in the folder"
                )
            out[name] = stored
    return out


def _refuse_missing_shards(paths: list[Path]) -> None:
    names = {p.name for p in paths}
    for path in paths:
        match = SHARD_NAME.fullmatch(path.name)
        for i in range(1, int(match["count"]) + 1) if match else ():
            name = f"{match['stem']}-{i:05d}-of-{match['count']}.safetensors" if match else ""
            if name not in names:
                raise CheckpointError(f"{path.with_name(name)}: this shard is missing; download it to this folder")


def _no_weights(folder: Path) -> CheckpointError | UnsupportedError:
    pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
    if pickles:
        return UnsupportedError(
            f"{folder}: has only PyTorch files ({shown(pickles[0])}), which can run code when opened; "
            "convert the model to safetensors"
        )
    return CheckpointError(f"{folder}: has a config.json but no .safetensors file; download the weights to this folder")
