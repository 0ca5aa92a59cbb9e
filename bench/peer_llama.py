"""llama.cpp as a process to compare with: one JSON request per line on stdin, one JSON answer per line on stdout.

    {"ids": [1, 2, 3], "tokens": 64}  →  {"token_ids": [...], "prefill_tokens_per_sec": …, "decode_tokens_per_sec": …}

Runs under any interpreter that has llama-cpp-python (it imports nothing of this project), so that the peer may live
in an environment of its own. Times llama_decode up to the moment when its logits can be read; picking the token is
outside, as it is in this project's own figures. Greedy, and it goes on after an end-of-text token.

    python peer_llama.py model.gguf THREADS
"""

import ctypes
import json
import sys
import time

import llama_cpp as llama
import numpy as np

CONTEXT = 2048


class Peer:
    """A loaded model with one sequence."""

    def __init__(self, path: str, threads: int):
        llama.llama_backend_init()
        # llama.cpp is talkative on stderr; a callback that does nothing keeps it quiet. It must outlive the model.
        self._quiet = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self._model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"{path}: llama.cpp cannot load it")
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = CONTEXT
        params.n_threads = params.n_threads_batch = threads
        self._context = llama.llama_init_from_model(self._model, params)
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))

    def _step(self, ids: list[int]) -> tuple[int, float]:
        """Feed the ids; the likeliest next token and the seconds it took."""
        tokens = (llama.llama_token * len(ids))(*ids)
        start = time.perf_counter()
        if llama.llama_decode(self._context, llama.llama_batch_get_one(tokens, len(ids))):
            raise SystemExit("llama_decode failed")
        logits = llama.llama_get_logits_ith(self._context, -1)  # waits for the computation
        seconds = time.perf_counter() - start
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax()), seconds

    def generate(self, ids: list[int], tokens: int) -> dict[str, object]:
        """Continue ids by `tokens` tokens."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        token, prefill_sec = self._step(ids)
        out, decode_sec = [token], 0.0
        while len(out) < tokens:
            token, seconds = self._step([token])
            decode_sec += seconds
            out.append(token)
        return {
            "token_ids": out,
            "prefill_tokens_per_sec": len(ids) / prefill_sec,
            "decode_tokens_per_sec": (len(out) - 1) / decode_sec,
        }


def main() -> None:
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(peer.generate(request["ids"], request["tokens"])), flush=True)


if __name__ == "__main__":
    main()
