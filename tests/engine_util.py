"""What tests of the whole engine share: stores made from checkpoints, synthetic models, engines in processes of their
own, and grids that cover every pair of settings."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from colibri_offload.storage.arena import anonymous
from colibri_offload.storage.manifest import Kind
from colibri_offload.storage.open import open_store
from colibri_offload.storage.writer import StoreWriter
from colibri_offload.text import hub

GGUF = Path(__file__).parent / "golden" / "gguf"
_CHILD = Path(__file__).with_name("engine_child.py")


def load_bench(name: str) -> ModuleType:
    """bench/NAME.py: a script beside the tests, in no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent.parent / "bench" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


gen_moe = load_bench("gen_moe")


def start_child(job: Mapping[str, Any], **environment: str) -> subprocess.Popen[str]:
    """A process that runs engine_child.py on `job`."""
    command = [sys.executable, str(_CHILD), json.dumps(job)]
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish_child(child: subprocess.Popen[str], timeout_sec: float = 100) -> dict[str, Any]:
    """What the child reported; fails with its standard error when it did not end well."""
    try:
        out, err = child.communicate(timeout=timeout_sec)
    finally:
        child.kill()
    assert child.returncode == 0, f"exit status {child.returncode}: {err[-2000:]}"
    return json.loads(out)


def run_child(job: Mapping[str, Any], **environment: str) -> dict[str, Any]:
    return finish_child(start_child(job, **environment))


def copy_store(store: Path, output: Path, kind: Kind) -> Path:
    """A converted store as one of another kind."""
    with open_store(store) as source, StoreWriter(output, kind, model=source.model) as writer:
        for name in source.resident_names():
            writer.add_resident(name, source.resident(name), source.resident_meta(name))
        for key in list(source.keys()):
            buffer = memoryview(anonymous(source.nbytes(key)))
            source.read_into(key, buffer)
            writer.add_expert(key, buffer[: source.nbytes(key)])
        path = writer.finish()
    hub.from_directory(store).save(path)
    return path


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few rows (one value per axis) in which every pair of values of two axes occurs. The same rows every time."""
    names = list(axes)
    missing = {
        frozenset({(a, x), (b, y)})
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(axes[a], axes[b])
    }
    every = [dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values())]
    rows = []
    while missing:
        best = max(every, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        rows.append(best)
    return rows


def _pairs(row: Mapping[str, Any]) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
