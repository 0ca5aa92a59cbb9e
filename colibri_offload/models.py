"""From a path (or the word "demo") to a model's weights and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from colibri_offload.checkpoint.base import Checkpoint
from colibri_offload.checkpoint.open import open_checkpoint
from colibri_offload.errors import UsageError
from colibri_offload.graph.packer import Packer
from colibri_offload.graph.source import CheckpointSource, ModelSource, StoreSource
from colibri_offload.storage.manifest import MANIFEST
from colibri_offload.storage.open import open_store
from colibri_offload.text import gguf, hub
from colibri_offload.text.tokenizer import Tokenizer

DEMO = "demo"


class TokenizerLoader(Protocol):
    """Makes the tokenizer when it is first needed: numbers can be computed without one."""

    def __call__(self) -> Tokenizer: ...


def model_path(model: str | Path) -> Path:
    """The path of a model; "demo" is the bundled one."""
    if str(model) == DEMO and not Path(model).exists():
        path = Path(__file__).parent / "data" / "demo"
        if not (path / MANIFEST).exists():
            raise UsageError(f"the bundled model is missing from {path}; install colibri-offload again")
        return path
    return Path(model)


def is_store(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def open_model(model: str | Path, packer: Packer) -> tuple[ModelSource, TokenizerLoader]:
    """Open any kind of model. Raises CheckpointError, StoreError or UnsupportedError."""
    path = model_path(model)
    if is_store(path):
        return StoreSource(path, open_store(path)), lambda: hub.from_directory(path)
    checkpoint = open_checkpoint(path)
    return CheckpointSource(checkpoint, packer), lambda: tokenizer_of(checkpoint)


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """A checkpoint's tokenizer. Raises TextError when it has none."""
    if checkpoint.kind == "gguf":
        return gguf.from_gguf(checkpoint.metadata)
    directory = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return hub.from_directory(directory)
