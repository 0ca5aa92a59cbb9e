"""Drives llama.cpp for vs_llamacpp.py: reads one JSON command per line, answers with one JSON line.

Runs under the interpreter that has `llama_cpp` installed and imports nothing of this project. Uses the C functions
directly, so that no Python work of the binding is measured.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import time


def main() -> None:
    # llama.cpp writes to stdout and stderr as it likes: keep a private channel for the answers
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    import llama_cpp as c

    model_path, threads, repack = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "repack"
    c.llama_backend_init()
    params = c.llama_model_default_params()
    params.use_extra_bufts = repack
    model = c.llama_model_load_from_file(model_path.encode(), params)
    if not model:
        answers.write(json.dumps({"error": f"llama.cpp cannot load {model_path}"}) + "\n")
        return
    context_params = c.llama_context_default_params()
    context_params.n_ctx, context_params.n_batch, context_params.n_ubatch = 4096, 512, 512
    context_params.n_threads = context_params.n_threads_batch = threads
    context = c.llama_init_from_model(model, context_params)
    vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    rng = random.Random(0)

    def decode(count: int) -> float:
        tokens = (ctypes.c_int32 * count)(*(rng.randrange(256, vocab) for _ in range(count)))
        start = time.perf_counter()
        if c.llama_decode(context, c.llama_batch_get_one(tokens, count)):
            raise RuntimeError("llama_decode failed")
        c.llama_synchronize(context)
        return time.perf_counter() - start

    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        c.llama_memory_clear(c.llama_get_memory(context), True)
        decode(command["prompt"]) if command["decode"] else None
        seconds = sum(decode(1) for _ in range(command["decode"])) if command["decode"] else decode(command["prompt"])
        answers.write(json.dumps({"sec": seconds}) + "\n")


if __name__ == "__main__":
    main()
