"""open_checkpoint: every accepted path, and a remedy for every other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoint_writers import gguf_bytes, hub, tensor_info

from colibri_offload.checkpoint.open import open_checkpoint
from colibri_offload.errors import CheckpointError, ColibriError, UnsupportedError

ROW = np.arange(8, dtype=np.float32)


def test_accepts_each_kind(tmp_path: Path) -> None:
    folder = hub(tmp_path / "hub", {"a": ROW})
    plain = tmp_path / "model.gguf"
    plain.write_bytes(gguf_bytes([], [tensor_info("a", [8], 0, 0)], ROW.tobytes()))
    blob = tmp_path / "sha256-0123"  # how some downloaders name a GGUF file
    blob.write_bytes(plain.read_bytes())
    for path, kind in [
        (folder, "safetensors"),
        (folder / "model.safetensors", "safetensors"),
        (plain, "gguf"),
        (blob, "gguf"),
    ]:
        for given in (path, str(path)):
            checkpoint = open_checkpoint(given)
            assert checkpoint.kind == kind and checkpoint.path == path
            assert np.array_equal(checkpoint.tensors["a"].read().view(np.float32), ROW)


def touch(name: str, content: bytes = b"x") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def inside(*names: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for name in names:
            (folder / name).write_bytes(b"{}")
        return folder

    return make


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda folder: folder / "absent.gguf", CheckpointError, "does not exist; give a .gguf file"),
        (inside(), CheckpointError, "is an empty directory"),
        (inside("README.md"), CheckpointError, "has no config.json"),
        (inside("a.gguf", "b.gguf"), CheckpointError, "give one of them, such as 'a.gguf'"),
        (inside("config.json"), CheckpointError, "no .safetensors file"),
        (inside("config.json", "pytorch_model.bin"), UnsupportedError, "convert the model to safetensors"),
        (inside("config.json", "consolidated.00.pth"), UnsupportedError, "convert the model to safetensors"),
        (touch("model.bin"), UnsupportedError, "convert it to safetensors"),
        (touch("notes.txt"), CheckpointError, "is not a model file"),
        (touch("config.json"), CheckpointError, "give the directory"),
        (touch("model.safetensors"), CheckpointError, "config.json: is missing"),
        (touch("model.gguf"), CheckpointError, "not a GGUF file"),
    ],
)
def test_other_paths_get_a_remedy(tmp_path: Path, make: Callable, kind: type[ColibriError], message: str) -> None:
    path = make(tmp_path)
    with pytest.raises(ColibriError) as caught:
        open_checkpoint(path)
    line = str(caught.value)
    assert type(caught.value) is kind and message in line and str(tmp_path) in line and "\n" not in line
