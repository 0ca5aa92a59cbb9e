"""Damaged bytes: a reader succeeds or raises a ColibriError, within a second and 50 MB, whatever the file says."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from checkpoint_writers import Stored, hub_typed
from test_checkpoint_gguf import write_model

from colibri_offload.checkpoint.open import open_checkpoint
from colibri_offload.errors import ColibriError

ROUNDS = 300
EXTREMES = [0, 1, 127, 128, 255, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 60, (1 << 63) - 1, (1 << 64) - 1]


def damaged(raw: bytes, rng: random.Random, header_nbytes: int) -> bytes:
    """A cut, some flipped bits, or an extreme number where another was; mostly in the header, where meaning lies."""
    out = bytearray(raw)
    kind = rng.randrange(4)
    if kind == 0:
        return raw[: rng.randrange(len(raw))]
    for _ in range(rng.choice([1, 1, 1, 3, 20])):
        at = rng.randrange(header_nbytes if rng.random() < 0.9 else len(raw))
        if kind == 1:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            out[at] = rng.randrange(256)
        else:
            number = struct.pack("<Q", rng.choice(EXTREMES))[: rng.choice([4, 8])]
            out[at : at + len(number)] = number
    return bytes(out[: len(raw)])


def attempt(path: Path) -> bool:
    """Open and read everything; whether that worked."""
    began = time.perf_counter()
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(path)
        for tensor in checkpoint.tensors.values():
            tensor.read()
        return True
    except ColibriError as error:
        assert "\n" not in str(error)
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50 << 20
        assert time.perf_counter() - began < 1


def fuzz(path: Path, opened: Path, seed: int, header_nbytes: int) -> None:
    raw = path.read_bytes()
    assert attempt(opened)
    outcomes = []
    for i in range(ROUNDS):
        path.write_bytes(damaged(raw, random.Random(f"{seed}/{i}"), header_nbytes))
        try:
            outcomes.append(attempt(opened))
        except BaseException:
            print(f"seed {seed}, round {i}")  # with these, damaged() gives the file again
            raise
    assert not all(outcomes)


@pytest.mark.parametrize("seed", [1, 2])
def test_gguf(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "m.gguf"
    write_model(path)
    fuzz(path, path, seed, 600)


def quantised_hub(folder: Path) -> Path:
    stored: Stored = {
        "m.qweight": ("I32", np.ones((8, 8), np.int32)),
        "m.qzeros": ("I32", np.ones((4, 1), np.int32)),
        "m.scales": ("F16", np.ones((4, 8), np.float16)),
        "m.g_idx": ("I32", np.arange(64, dtype=np.int32) // 16),
        "n.weight": ("F32", np.ones((4, 4), np.float32)),
    }
    return hub_typed(folder, stored, {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16}})


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_hub(tmp_path: Path, file: str) -> None:
    folder = quantised_hub(tmp_path / "m")
    fuzz(folder / file, folder, 3, min(400, (folder / file).stat().st_size))


def test_index(tmp_path: Path) -> None:
    folder = quantised_hub(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"m.qweight": "a.safetensors", "n.weight": "a.safetensors"}}')
    fuzz(index, folder, 4, index.stat().st_size)
