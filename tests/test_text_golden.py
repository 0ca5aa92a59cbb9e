"""Both golden tokenizers, read from a hub directory and from GGUF, against what transformers recorded."""

import pytest
from text_util import SOURCES, golden, load, model_of

ENCODINGS = [(s, e) for s in SOURCES for e in golden(model_of(s))["encodings"]]
CHATS = [(s, c) for s in SOURCES for c in golden(model_of(s))["chats"]]


@pytest.mark.parametrize(("source", "case"), ENCODINGS, ids=lambda v: v if isinstance(v, str) else repr(v["text"])[:20])
def test_encodings_and_decodings(source, case):
    tokenizer = load(source)
    assert tokenizer.encode(case["text"], allow_special=True) == case["ids"]
    assert tokenizer.encode(case["text"], add_special=False, allow_special=True) == case["ids_no_special"]
    assert tokenizer.decode(case["ids"], skip_special=False) == case["decoded"]
    assert tokenizer.decode(case["ids"]) == case["decoded_skip_special"]


@pytest.mark.parametrize(("source", "case"), CHATS, ids=lambda v: v if isinstance(v, str) else "")
def test_chats(source, case):
    tokenizer = load(source)
    assert tokenizer.render_chat(case["messages"], tools=case["tools"], **case["kwargs"]) == case["rendered"]
    assert tokenizer.encode_chat(case["messages"], tools=case["tools"], **case["kwargs"]) == case["ids"]


@pytest.mark.parametrize("source", SOURCES)
def test_vocabulary(source):
    tokenizer = load(source)
    assert tokenizer.vocab_size == golden(model_of(source))["vocab_size"]
    assert tokenizer.padded_size == 512
    assert tokenizer.eos_ids == ({480, 482} if model_of(source) == "qwen3_moe" else {2})


@pytest.mark.parametrize("source", ["mixtral-hub", "mixtral-gguf"])
def test_bos_of_sentencepiece(source):
    assert load(source).bos_id == 1
    assert load(source).encode("a")[0] == 1
