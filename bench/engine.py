"""What the whole engine makes of the kernels: long contexts, time outside native code, start-up, narrower CPUs.

    python bench/engine.py MODEL [--threads 2] [--runs 5] [--contexts 512,4096,16384]

- contexts: decode time at a depth, beside what the KV bytes read explain at the speed the weights are read with. The
  KV pages are filled with ones, since a prompt of that length is not what is measured.
- outside: share of a decoded token that is not spent in native code.
- start: a second start to the first token: everything compiled, files in the page cache, experts read as needed.
- targets: prefill and decode with AVX2 kernels beside the best ones, taking turns.

Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any

import numpy as np

from colibri_offload import Engine
from colibri_offload.graph.memory import Sequence
from colibri_offload.graph.model import kv_offsets
from colibri_offload.graph.step import Part
from colibri_offload.jit.kernels.kv_types import PAGE
from colibri_offload.jit.pool import WorkerPool
from colibri_offload.tuning.bench import random_prompt

START = """
import sys, time
start = time.perf_counter()
from colibri_offload import Engine
imported = time.perf_counter()
with Engine.load(sys.argv[1], threads=int(sys.argv[2]), lazy=True) as engine:
    loaded = time.perf_counter()
    engine.generate([1, 2, 3], max_tokens=1, ignore_eos=True)
    first = time.perf_counter()
    compiler = engine.runtime.kernels.compiler
    print(imported - start, loaded - imported, first - loaded, compiler.compiled, engine.runtime.source.resident_nbytes)
"""


def decode_ms(engine: Engine, sequence: Sequence, runs: int) -> float:
    """Median time of one decoded token, in ms; the sequence is as long afterwards as before."""
    length, times = sequence.length, []
    for token in random_prompt(engine.spec.vocab, runs + 2, 0):
        start = time.perf_counter()
        engine.runtime.model.forward([Part(sequence, np.array([token], np.int32), 1)])
        times.append(time.perf_counter() - start)
        sequence.rewind(length)
    return 1e3 * median(times[2:])


def contexts(engine: Engine, depths: list[int], runs: int) -> list[dict[str, float]]:
    runtime = engine.runtime
    _, page_nbytes = kv_offsets(engine.spec, runtime.sizes.kv_type)
    per_position = page_nbytes / PAGE
    rows: list[dict[str, float]] = []
    base = 0.0
    for depth in [16, *depths]:
        sequence = Sequence(runtime.model.kv, runtime.sizes.ctx)
        sequence.reserve(depth)
        for address in sequence.table[: -(-depth // PAGE)]:
            ones = (np.ctypeslib.ctypes.c_uint16 * (page_nbytes // 2)).from_address(int(address))
            np.frombuffer(ones, np.uint16)[:] = 0x3C00 if runtime.sizes.kv_type == "f16" else 0x0101
        sequence.length = depth
        ms = decode_ms(engine, sequence, runs)
        sequence.close()
        base = base or ms
        rows.append({"depth": depth, "ms": ms, "kv_bytes": per_position * depth})
    return rows


def outside(engine: Engine, tokens: int) -> float:
    """Share of the decode's time that is not in native code: a long generation less one of a single token."""
    native = 0.0
    run = WorkerPool.run

    def timed(self: WorkerPool, *args: int) -> None:
        nonlocal native
        start = time.perf_counter()
        run(self, *args)
        native += time.perf_counter() - start

    prompt = random_prompt(engine.spec.vocab, 8, 1)
    engine.generate(prompt, max_tokens=8, ignore_eos=True)
    spent = []
    WorkerPool.run = timed  # type: ignore[method-assign]
    try:
        for count in (1, tokens + 1):
            native, start = 0.0, time.perf_counter()
            engine.generate(prompt, max_tokens=count, ignore_eos=True)
            spent.append((time.perf_counter() - start, native))
    finally:
        WorkerPool.run = run  # type: ignore[method-assign]
    (total_one, native_one), (total_all, native_all) = spent
    return 1 - (native_all - native_one) / (total_all - total_one)


def start(model: str, threads: int, runs: int) -> dict[str, Any]:
    rows = []
    for _ in range(runs + 1):
        argv = [sys.executable, "-c", START, model, str(threads)]
        rows.append([float(x) for x in subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()])
    imported, loaded, first, compiled, resident = (median(column) for column in zip(*rows[1:], strict=True))
    return {"import_sec": imported, "load_sec": loaded, "first_token_sec": first, "compiled": compiled,
            "resident_bytes": resident}  # fmt: skip


def targets(model: str, threads: int, runs: int) -> dict[str, dict[str, float]]:
    """Medians of `colibri bench` figures with the best and with the AVX2 target, alternating."""
    figures: dict[str, dict[str, list[float]]] = {}
    for _ in range(runs):
        for target in ("", "avx2"):
            argv = [sys.executable, "-m", "colibri_offload.cli", "bench", model, "--threads", str(threads), "--json"]
            argv += ["--runs", "1", "--prompt-tokens", "256", "--decode-tokens", "32", "--preload"]
            env = os.environ | ({"COLIBRI_TARGET": target} if target else {})
            out = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True, env=env).stdout)
            for name in ("prefill_tokens_per_sec", "decode_tokens_per_sec"):
                figures.setdefault(target or "best", {}).setdefault(name, []).append(out[name])
    return {t: {name: median(values) for name, values in f.items()} for t, f in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--contexts", default="512,4096,16384")
    parser.add_argument("--skip", default="", help="some of contexts,outside,start,targets")
    args = parser.parse_args()
    skip, result = args.skip.split(","), {"bench": "engine", "model": args.model, "threads": args.threads}
    if "start" not in skip:
        result["start"] = s = start(args.model, args.threads, args.runs)
        print("start:", ", ".join(f"{k} {v:.3g}" for k, v in s.items()))
    if "contexts" not in skip or "outside" not in skip:
        depths = [int(d) for d in args.contexts.split(",")]
        with Engine.load(args.model, threads=args.threads, preload=True, ctx=max(depths) + PAGE) as engine:
            result["outside"] = outside(engine, 64)
            print(f"outside native code: {result['outside']:.1%} of a decoded token")
            result["contexts"] = rows = contexts(engine, depths, 4 * args.runs)
            source = engine.runtime.source
            moved = source.resident_nbytes - (0 if engine.spec.tied else source.residents["embed"].nbytes)
            layouts = source.expert_layouts
            ffns = [engine.spec.layers[i].ffn for i in layouts]
            active = sum(layouts[i].nbytes * getattr(f, "top_k", 1) for i, f in zip(layouts, ffns, strict=True))
            for row in rows:
                explained = rows[0]["ms"] * (1 + row["kv_bytes"] / (moved + active))
                row["explained_ms"] = explained
                print(f"depth {row['depth']:6}: {row['ms']:8.2f} ms; KV bytes explain {explained:.2f} ms")
    if "targets" not in skip:
        result["targets"] = targets(args.model, args.threads, args.runs)
        print("targets:", json.dumps(result["targets"]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
