"""The two golden tokenizers, as hub directories and as GGUF metadata.

`qwen3_moe` is byte-level BPE with chat markers; `mixtral` is SentencePiece-style BPE with byte fallback. Ids, decodings
and rendered chats in tokenizer_golden.json were recorded from transformers 5.24.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from colibri_offload.text.gguf import from_gguf
from colibri_offload.text.hub import from_directory
from colibri_offload.text.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data" / "text"
MODELS = ("qwen3_moe", "mixtral")
SOURCES = tuple(f"{model}-{kind}" for model in MODELS for kind in ("hub", "gguf"))


def golden(model: str) -> dict[str, Any]:
    return json.loads((DATA / model / "tokenizer_golden.json").read_text(encoding="utf-8"))


def gguf_metadata(model: str) -> dict[str, Any]:
    return json.loads((DATA / model / "gguf_metadata.json").read_text(encoding="utf-8"))


@cache
def load(source: str) -> Tokenizer:
    model, kind = source.split("-")
    return from_directory(DATA / model) if kind == "hub" else from_gguf(gguf_metadata(model))


def model_of(source: str) -> str:
    return source.split("-")[0]
