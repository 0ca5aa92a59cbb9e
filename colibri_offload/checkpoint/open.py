"""The one entry to a model's files: a GGUF file, a hub directory, or a safetensors file beside its config.json."""

from __future__ import annotations

from pathlib import Path

from colibri_offload.checkpoint.base import Checkpoint
from colibri_offload.checkpoint.files import open_checked, refuse_lfs_pointer, shown
from colibri_offload.checkpoint.gguf import GgufCheckpoint
from colibri_offload.checkpoint.gguf_file import MAGIC
from colibri_offload.checkpoint.safetensors import HubCheckpoint
from colibri_offload.errors import CheckpointError, UnsupportedError

ACCEPTED = "a .gguf file, a directory with config.json and .safetensors files, or one such .safetensors file"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open and check a model. Any part of a split one will do.

    Raises CheckpointError or UnsupportedError, naming the path, what was found there and what is expected.
    """
    path = Path(path)
    if path.is_dir():
        return _open_directory(path)
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist; give {ACCEPTED}")
    if path.suffix == ".safetensors":
        return HubCheckpoint(path)
    if path.suffix == ".gguf" or _head(path) == MAGIC:
        return GgufCheckpoint(path)
    if path.name in ("config.json", "model.safetensors.index.json"):
        raise CheckpointError(f"{path}: describes a model; give the directory {path.parent} instead")
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise UnsupportedError(f"{path}: is a PyTorch file, which can run code when opened; convert it to safetensors")
    raise CheckpointError(f"{path}: is not a model file; give {ACCEPTED}")


def _head(path: Path) -> bytes:
    with open_checked(path) as (f, _):
        head = f.read(64)
    refuse_lfs_pointer(path, head)
    return head[: len(MAGIC)]


def _open_directory(path: Path) -> Checkpoint:
    if (path / "config.json").is_file():
        return HubCheckpoint(path)
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs:
        raise CheckpointError(f"{path}: is a directory of GGUF files; give one of them, such as {shown(ggufs[0].name)}")
    if not any(path.iterdir()):
        raise CheckpointError(f"{path}: is an empty directory; give {ACCEPTED}")
    raise CheckpointError(f"{path}: has no config.json; give {ACCEPTED}")
