"""The small files that lie beside a store's weights: tokenizer and configuration, with their checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from colibri_offload.checkpoint.base import Checkpoint
from colibri_offload.errors import CheckpointError
from colibri_offload.models import TokenizerLoader

_CONFIGS = ("config.json", "generation_config.json")


def side_files(checkpoint: Checkpoint, load_tokenizer: TokenizerLoader) -> dict[str, bytes]:
    """File name → content. Raises TextError when the model has no usable tokenizer."""
    return config_files(checkpoint) | _tokenizer_files(load_tokenizer)


def config_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The configuration of a hub directory; a GGUF file has none beside it."""
    if checkpoint.kind == "gguf":
        return {}
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return {name: _read(folder / name) for name in _CONFIGS if (folder / name).is_file()}


def _tokenizer_files(load_tokenizer: TokenizerLoader) -> dict[str, bytes]:
    with TemporaryDirectory(prefix="colibri-") as folder:
        load_tokenizer().save(folder)
        return {path.name: _read(path) for path in sorted(Path(folder).iterdir())}


def describe(files: Mapping[str, bytes]) -> dict[str, Any]:
    """What the manifest says about the files, for broken_files."""
    return {name: {"nbytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for name, d in files.items()}


def broken_files(store: Path, described: Mapping[str, Any]) -> list[str]:
    """Names of the described files that are missing from the store or have other content."""
    return [name for name, facts in described.items() if not _sound(store / name, facts)]


def _sound(path: Path, facts: Mapping[str, Any]) -> bool:
    return path.is_file() and hashlib.sha256(_read(path)).hexdigest() == facts.get("sha256")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check the file and the disk") from error
