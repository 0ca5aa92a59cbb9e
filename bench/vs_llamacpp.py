"""Decode and prefill beside llama.cpp: same file, same threads, alternating runs, medians.

    python bench/vs_llamacpp.py MODEL.gguf [MODEL2.gguf …] --peer-python PYTHON [--threads 2,1] [--runs 5]

PYTHON is an interpreter in which `pip install llama-cpp-python` was built natively (this script builds nothing). Both
sides are loaded at once, in processes of their own, and take turns. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
TESTS = {
    "tg64": {"prompt": 16, "decode": 64},
    "pp512": {"prompt": 512, "decode": 0},
    "pp64": {"prompt": 64, "decode": 0},
}


class Side:
    """A child process that runs commands and says how long they took."""

    def __init__(self, argv: list[str]):
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            raise SystemExit(answer["error"])
        return answer

    def seconds(self, command: dict[str, int]) -> float:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["sec"])

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)


def serve(model: str, threads: int) -> None:
    """This project's side, in a child process: the same commands, through the model's forward pass."""
    import numpy as np

    from colibri_offload import Engine
    from colibri_offload.graph.memory import Sequence
    from colibri_offload.graph.step import Part

    with Engine.load(model, threads=threads, preload=True) as engine:
        runtime, rng = engine.runtime, np.random.default_rng(0)

        def feed(sequence: Sequence, count: int) -> float:
            ids = rng.integers(256, engine.spec.vocab, count).astype(np.int32)
            start = time.perf_counter()
            for at in range(0, count, runtime.sizes.tokens):
                runtime.model.forward([Part(sequence, ids[at : at + runtime.sizes.tokens], 1)])
            return time.perf_counter() - start

        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            sequence = Sequence(runtime.model.kv, runtime.sizes.ctx)
            prefill = feed(sequence, command["prompt"])
            decode = sum(feed(sequence, 1) for _ in range(command["decode"]))
            sequence.close()
            print(json.dumps({"sec": decode if command["decode"] else prefill}), flush=True)


def compare(model: str, threads: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    ours = Side([sys.executable, __file__, "--serve", model, "--threads", str(threads)])
    peer = Side([args.peer_python, str(HERE / "peer_llamacpp.py"), model, str(threads), args.peer_flags])
    rows = []
    for name, command in TESTS.items():
        if args.tests and name not in args.tests.split(","):
            continue
        tokens = command["decode"] or command["prompt"]
        ours.seconds(command), peer.seconds(command)  # warm-up
        a, b = [], []
        for _ in range(args.runs):
            a.append(tokens / ours.seconds(command))
            time.sleep(0.2)  # the peer's idle threads spin for a while
            b.append(tokens / peer.seconds(command))
            time.sleep(0.2)
        row = {
            "model": Path(model).name, "threads": threads, "test": name, "peer_flags": args.peer_flags,
            "ours": median(a), "peer": median(b), "ratio": median(x / y for x, y in zip(a, b, strict=True)),
            "ours_spread": [min(a), max(a)], "peer_spread": [min(b), max(b)],
        }  # fmt: skip
        rows.append(row)
        print(
            f"{row['model']:24} {threads} {name:6} ours {row['ours']:8.1f} [{min(a):.1f}–{max(a):.1f}]  llama.cpp "
            f"{row['peer']:8.1f} [{min(b):.1f}–{max(b):.1f}] tokens/s  ratio {row['ratio']:.2f}", flush=True,
        )  # fmt: skip
    ours.close(), peer.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--peer-flags", choices=["repack", "norepack"], default="repack", help="repack is its default")
    parser.add_argument("--threads", default="2,1")
    parser.add_argument("--tests", default="", help=f"some of {','.join(TESTS)}")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, int(args.threads))
        return
    rows = [r for model in args.models for t in map(int, args.threads.split(",")) for r in compare(model, t, args)]
    print(json.dumps({"bench": "vs_llamacpp", "results": rows}))


if __name__ == "__main__":
    main()
