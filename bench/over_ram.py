"""Models larger than memory: decode and prefill under a memory cgroup, beside llama.cpp under the same cap.

    python bench/over_ram.py MODEL.gguf|STORE … --limit 4GiB [--peer-python PYTHON --peer-model MODEL.gguf]

Each side runs in a cgroup of its own with the same limit, loads once, and takes turns: 16 prompt tokens, then
`--tokens` decoded ones; then, with --prefill, 512 prompt tokens. llama.cpp runs with mmap and without repacking: with
its defaults it is killed at such sizes. The files' pages are dropped from the page cache first, or they would be
charged elsewhere. A disk ceiling is measured in the same run by reading the model directly, past the page cache. Ends
with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from cgroup import Cgroup, memory_cgroup

from colibri_offload.scheduler.memory import parse_size

HERE = Path(__file__).parent
CHUNK = 4 << 20


def files_of(model: Path) -> list[Path]:
    return [p for p in model.rglob("*") if p.is_file()] if model.is_dir() else [model]


def forget(model: Path) -> None:
    """Drop a model's files from the page cache."""
    for path in files_of(model):
        with open(path, "rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_bytes_per_sec(model: Path, nbytes: int = 1 << 30) -> float:
    """Sequential direct reads of 4 MiB, one at a time."""
    path = max(files_of(model), key=lambda p: p.stat().st_size)
    buffer, done = mmap.mmap(-1, CHUNK), 0
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    start = time.perf_counter()
    try:
        while done < min(nbytes, path.stat().st_size - CHUNK):
            done += os.preadv(fd, [buffer], done)
    finally:
        os.close(fd)
    return done / (time.perf_counter() - start)


class Side:
    """A child process in a cgroup that answers commands, one JSON line each."""

    def __init__(self, argv: list[str], group: Cgroup):
        def join() -> None:
            group.procs.write_text(str(os.getpid()))

        self.group = group
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=join
        )
        self.ask(None)

    def ask(self, command: dict[str, int] | None) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        if command is not None:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended (OOM kills: {self.group.oom_kills()})")
        answer = json.loads(line)
        if "error" in answer:
            raise SystemExit(answer["error"])
        return answer

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)


def serve(model: str, options: dict[str, Any]) -> None:
    """This project's side."""
    from colibri_offload import Engine
    from colibri_offload.tuning.bench import random_prompt

    with Engine.load(model, **options) as engine:
        print(json.dumps({"budget": engine.runtime.budget.total_bytes, "slots": engine.runtime.sizes.slots,
                          "blocks": engine.runtime.sizes.total_blocks}), flush=True)  # fmt: skip
        for seed, line in enumerate(sys.stdin):
            command = json.loads(line)
            ids = random_prompt(engine.spec.vocab, command["prompt"], seed)
            out = engine.generate(ids, max_tokens=command["decode"] + 1, ignore_eos=True)
            s = out.stats
            sec = command["decode"] / s.decode_tokens_per_sec if command["decode"] else s.ttft_sec
            answer = {"sec": sec, "hits": s.expert_hits, "misses": s.expert_misses, "bytes": s.bytes_read,
                      "stall": s.stall_sec, "used": s.prefetch_bytes_used, "wasted": s.prefetch_bytes_wasted,
                      "recall": s.predictor_recall, "peak": s.peak_memory_bytes}  # fmt: skip
            print(json.dumps(answer), flush=True)


def sides(args: argparse.Namespace, stack: ExitStack) -> Iterator[tuple[str, Side]]:
    limit = parse_size(args.limit, "--limit")
    for i, model in enumerate(args.models):
        forget(Path(model))
        group = stack.enter_context(memory_cgroup(limit, f"colibri-bench-{i}"))
        argv = [sys.executable, __file__, "--serve", model, "--options", args.options]
        yield Path(model).name, Side(argv, group)
    if args.peer_python:
        group = stack.enter_context(memory_cgroup(limit, "colibri-bench-peer"))
        argv = [args.peer_python, str(HERE / "peer_llamacpp.py"), args.peer_model, str(args.threads), "norepack"]
        yield "llama.cpp", Side(argv, group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--limit", default="4GiB")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--options", default="{}", help="JSON of keywords for Engine.load")
    parser.add_argument("--peer-python", default="")
    parser.add_argument("--peer-model", default="")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, {"ctx": 1024, **json.loads(args.options)})
        return
    tests = {"decode": {"prompt": 16, "decode": args.tokens}} | (
        {"prefill": {"prompt": 512, "decode": 0}} if args.prefill else {}
    )
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        running = list(sides(args, stack))
        for test, command in tests.items():
            tokens = command["decode"] or command["prompt"]
            rows: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in running}
            disk = []
            for turn in range(args.runs + 1):
                disk.append(disk_bytes_per_sec(Path(args.models[0])))
                for name, side in running:
                    answer = side.ask(command)
                    if turn:
                        rows[name].append(answer)
            for name, side in running:
                rates = [tokens / a["sec"] for a in rows[name]]
                result = {"side": name, "test": test, "tokens_per_sec": median(rates), "min": min(rates),
                          "max": max(rates), "cgroup_peak": side.group.peak,
                          "disk_bytes_per_sec": median(disk)}  # fmt: skip
                for key in set(rows[name][0]) - {"sec"}:
                    result[key] = median(a[key] for a in rows[name])
                results.append(result)
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}, flush=True)
        for _, side in running:
            side.close()
    print(json.dumps({"bench": "over_ram", "limit": args.limit, "results": results}))


if __name__ == "__main__":
    main()
