"""GGUF metadata: pre-tokenizers, defaults, and arrays that are missing or disagree."""

import random
import time
import warnings
from itertools import pairwise
from typing import Any

import pytest
from text_util import gguf_metadata

from colibri_offload.errors import TextError, UnsupportedError
from colibri_offload.text.gguf import from_gguf
from colibri_offload.text.merges import merges_from_scores
from colibri_offload.text.pieces import BYTE_OF_CHARACTER
from colibri_offload.text.pretokenizers import PRE_TOKENIZERS

P = "tokenizer.ggml."


def byte_tokenizer(**keys):
    """Every byte is a token and nothing merges: words cannot be seen, but ids can."""
    metadata = {P + "model": "gpt2", P + "pre": "gpt-2", P + "tokens": list(BYTE_OF_CHARACTER), P + "merges": []}
    return metadata | {P + k: v for k, v in keys.items()}


# Cut by hand by each family's rules for digits, case, contractions and scripts. (DeepSeek-LLM's second expression
# counts ASCII letters as punctuation and so cuts at letters with accents: the published file does.)
WORDS = [
    ("gpt-2", "Hello 12345 it's IT'S", ["Hello", " 12345", " it", "'s", " IT", "'", "S"]),
    ("gpt-2", "a  b\n\n c", ["a", " ", " b", "\n\n", " c"]),
    ("smollm", "a 123,4", ["a", " ", "1", "2", "3", ",", "4"]),
    ("llama-bpe", "12345 IT'S (ok)\n", ["123", "45", " IT", "'S", " (", "ok", ")\n"]),
    ("qwen2", "123 IT'S", ["1", "2", "3", " IT", "'S"]),
    ("qwen35", "नमस्ते 12", ["नमस्ते", " ", "1", "2"]),
    ("deepseek-llm", "Hello wörld 12你好。", ["Hello", " w", "ö", "rld", " ", "1", "2", "你好", "。"]),
    ("deepseek-coder", "x1 += 你", ["x", "1", " +=", " ", "你"]),
    ("deepseek-v3", "Hi 12345你好。(foo (bar", ["Hi", " ", "123", "45", "你好", "。(", "foo", " (", "bar"]),
    ("gpt-4o", "fooBar HTTPServer's 1234/\n", ["foo", "Bar", " HTTPServer's", " ", "123", "4", "/\n"]),
    ("tekken", "fooBar it's 12", ["foo", "Bar", " it", "'s", " ", "1", "2"]),
    ("kimi-k2", "今天hello 1234", ["今天", "hello", " ", "123", "4"]),
    ("falcon", "a1234 (x)", ["a", "123", "4", " ", "(", "x", ")"]),
    ("bailingmoe", "don'T 12\n\n", ["don", "'T", " ", "1", "2", "\n\n"]),
    ("afmoe", "1234567 xกข", ["1", "234", "567", " xกข"]),
    ("exaone-moe", "a b 1", ["a b", " ", "1"]),
    ("default", "Hi, you! 1234", ["Hi", ",", " you", "!", " ", "123", "4"]),
]


@pytest.mark.parametrize(("name", "text", "words"), WORDS, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(WORDS)])
def test_words(name, text, words):
    assert [text[a:b] for _, (a, b) in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)] == words


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_the_text(name):
    text = "It's 12345 wörld… 今天\r\n\tfooBar  x_y (a) 한국어 \u0e01 ٣٤ 🙂\n\n"
    tokenizer = from_gguf(byte_tokenizer(pre=name))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_unknown_pre_tokenizer_warns_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            tokenizer = from_gguf(byte_tokenizer(pre="from-the-future"))
    assert [str(w.message).split(":")[0] for w in caught] == [P + "pre is 'from-the-future', which is not known"]
    assert tokenizer.decode(tokenizer.encode("still works 123")) == "still works 123"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"pre": "gpt-2"}, []),
        ({"pre": "llama-bpe"}, [5]),
        ({"pre": "llama-bpe", "add_bos_token": False}, []),
        ({"pre": "gpt-2", "add_bos_token": True}, [5]),
    ],
)
def test_bos_by_the_file_or_by_the_family(keys, expected):
    tokenizer = from_gguf(
        byte_tokenizer(bos_token_id=5, eos_token_id=6, token_type=[1] * 5 + [3] * 2 + [1] * 249, **keys)
    )
    assert tokenizer.encode("") == expected


def test_family_that_adds_bos_in_a_file_without_one():
    assert from_gguf(byte_tokenizer(pre="llama-bpe")).encode("") == []


def test_end_ids_are_named_or_known_by_text():
    tokens = [*BYTE_OF_CHARACTER, "<|end|>", "<|return|>", "<|call|>", "<|eot_id|>", "<|im_end|>"]
    types = [1] * 256 + [3] * 4 + [1]  # the last looks like a marker but is ordinary text
    keys: dict[str, Any] = {"tokens": tokens, "token_type": types, "eos_token_id": 10, "eot_token_id": 11}
    assert from_gguf(byte_tokenizer(**keys)).eos_ids == {10, 11, 257, 258, 259}
    # Without <|return|>, <|end|> ends the turn.
    assert 256 in from_gguf(byte_tokenizer(**keys | {"token_type": [1] * 256 + [3, 1, 3, 3, 1]})).eos_ids


def test_padding_decodes_to_nothing_and_beyond_it_is_an_error():
    tokenizer = from_gguf(gguf_metadata("qwen3_moe"))
    assert (tokenizer.vocab_size, tokenizer.padded_size) == (487, 512)
    assert tokenizer.decode([39, 500, 321]) == "Hel"
    for bad in (512, -1):
        with pytest.raises(TextError, match=f"token id {bad} is outside 0…511"):
            tokenizer.decode([bad])


def test_user_defined_tokens_are_found_but_not_special():
    tokens = [*BYTE_OF_CHARACTER, "<think>"]
    tokenizer = from_gguf(byte_tokenizer(tokens=tokens, token_type=[1] * 256 + [4]))
    assert tokenizer.encode("a<think>")[1:] == [256]
    assert tokenizer.decode([256]) == "<think>"


@pytest.mark.parametrize(("prefix", "first"), [(True, "▁a"), (False, "a")])
def test_space_prefix(prefix, first):
    metadata = gguf_metadata("mixtral") | {P + "add_space_prefix": prefix}
    tokenizer = from_gguf(metadata)
    assert metadata[P + "tokens"][tokenizer.encode("a")[1]] == first
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


def test_sentencepiece_with_explicit_merges():
    tokens = ["<unk>", "<s>", "<0x0A>", "▁", "a", "b", "ab", "▁ab", "\n"]
    metadata: dict[str, Any] = {P + "model": "gemma4", P + "tokens": tokens, P + "token_type": [2, 3, 6] + [1] * 6}
    metadata |= {P + "merges": ["a b", "▁ ab"], P + "bos_token_id": 1, P + "unknown_token_id": 0}
    tokenizer = from_gguf(metadata)
    assert tokenizer.encode("ab ab\nb") == [1, 6, 7, 8, 5]
    assert tokenizer.decode([1, 7, 2, 5]) == " ab\nb"


def test_named_chat_templates():
    templates = {"tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T"}
    tokenizer = from_gguf(byte_tokenizer() | templates)
    assert tokenizer.render_chat([]) == "D"
    assert tokenizer.render_chat([], tools=[{}]) == "T"


def spm_reference(text, scores):
    """SentencePiece's own procedure: join, again and again, the leftmost best-scored pair."""
    pieces = list(text)
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not joins:
            return pieces
        i = min(joins)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def test_merges_from_scores_do_what_sentencepiece_does():
    rng = random.Random(7)
    for _ in range(30):
        pieces = list("abc") + sorted({"".join(rng.choices("abc", k=rng.randint(2, 4))) for _ in range(12)})
        scores = {p: -float(i) for i, p in enumerate(rng.sample(pieces, len(pieces)))}
        types = [1] * len(pieces)
        metadata = {P + "model": "llama", P + "tokens": pieces, P + "token_type": types, P + "add_space_prefix": False}
        tokenizer = from_gguf(metadata | {P + "scores": [scores[p] for p in pieces], P + "add_bos_token": False})
        for _ in range(20):
            text = "".join(rng.choices("abc", k=rng.randint(1, 12)))
            assert [pieces[i] for i in tokenizer.encode(text)] == spm_reference(text, scores), (pieces, scores, text)


def test_control_tokens_are_never_merged():
    assert merges_from_scores(["<", "s>", "<s>", "a", "<a"], [0, 0, 9, 0, 1], [0, 1, 3, 4]) == [("<", "a")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "model is missing"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": "abc"}, "tokens is a str, not an array"),
        ({"tokens": [1, 2]}, r"tokens\[0\] is 1, not a str"),
        ({"tokens": ["a", "b", "a"]}, "ids 0 and 2 are both 'a'"),
        ({"tokens": ["a", "\udce4"]}, r"tokens\[1\] is '\\udce4', not valid UTF-8"),
        ({"token_type": [1, 1]}, "token_type has 2 entries but tokenizer.ggml.tokens has 256"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a b"]}, r"merges\[0\] is 'a b', which does not join two tokens"),
        ({"merges": ["ab"]}, r"merges\[0\] is 'ab', which does not join two tokens"),
        ({"eos_token_id": 256}, "eos_token_id is 256, but there are 256 tokens"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"add_bos_token": True}, "add_bos_token is true but there is no bos token"),
    ],
)
def test_errors_name_the_key(change, message):
    metadata = {k: v for k, v in byte_tokenizer(**change).items() if v is not None}
    with pytest.raises(TextError, match=message) as e:
        from_gguf(metadata)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": None}, "scores is missing"),
        ({"scores": [0.0]}, "scores has 1 entries but tokenizer.ggml.tokens has 512"),
    ],
)
def test_errors_of_sentencepiece_arrays(change, message):
    metadata = gguf_metadata("mixtral") | {P + k: v for k, v in change.items()}
    with pytest.raises(TextError, match=message):
        from_gguf(metadata)


def test_template_that_is_not_a_string():
    with pytest.raises(TextError, match=r"tokenizer\.chat_template is a list, not a string"):
        from_gguf(byte_tokenizer() | {"tokenizer.chat_template": []})


def test_other_models_are_refused():
    with pytest.raises(UnsupportedError, match="'bert': supported are gpt2, llama and gemma4"):
        from_gguf(byte_tokenizer(model="bert"))


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_large_vocabularies_load_quickly(model):
    rng = random.Random(3)
    tokens = list(BYTE_OF_CHARACTER)
    merges, seen = [], set(tokens)
    while len(tokens) < 60_000:
        left, right = rng.choice(tokens), tokens[rng.randrange(256)]
        if left + right not in seen and len(left) < 9:
            seen.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    metadata = {P + "model": model, P + "pre": "qwen2", P + "tokens": tokens, P + "token_type": [1] * len(tokens)}
    metadata |= {P + "merges": merges, P + "scores": [-float(i) for i in range(len(tokens))]}
    start = time.perf_counter()
    from_gguf(metadata)
    # 150 000 tokens are to load within 2 s; here 60 000, with room for a busy machine.
    assert time.perf_counter() - start < 2.5
