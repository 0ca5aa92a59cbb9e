"""The tokenizer that a GGUF file carries in its metadata.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (tokenizer.ggml.*) and, for what the specification
leaves open (defaults, how `pre` is read, tokens that end a generation), llama.cpp's `src/llama-vocab.cpp`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from colibri_offload.errors import TextError, UnsupportedError
from colibri_offload.text.merges import merges_from_scores
from colibri_offload.text.posts import set_bos_eos
from colibri_offload.text.pretokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from colibri_offload.text.tokenizer import Tokenizer

_P = "tokenizer.ggml."


class _Type(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Files name one eos; chat models also end a turn, and these texts mean nothing else.
_END_OF_TURN = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
    *("<EOT>", "[EOT]", "[EOS]", "[e~["),
)
# Where a model has these, "<|end|>" ends a message within a turn, not the turn (gpt-oss; Solar Open).
_END_ENDS_MESSAGE = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer described by a GGUF file's key-value section.

    Raises TextError naming the key that is missing, of a wrong length or out of range; UnsupportedError for a tokenizer
    model other than byte-level BPE ("gpt2") and SentencePiece BPE ("llama", "gemma4").
    Warns once about a `tokenizer.ggml.pre` that is not known, and then cuts words by llama.cpp's default.
    """
    vocabulary = _Vocabulary(metadata)
    model = metadata.get(_P + "model")
    match model:
        case "gpt2":
            pre = _pre_tokenizer(metadata)
            special, adds_bos = vocabulary.special_tokens(), pre.adds_bos
            backend = _byte_level(vocabulary, pre)
        case "llama":
            special, adds_bos = vocabulary.sentencepiece_defaults() | vocabulary.special_tokens(), True
            prefix = metadata.get(_P + "add_space_prefix", True)
            backend = _sentencepiece(vocabulary, vocabulary.derived_merges(), special.get("unk_token"), prefix=prefix)
        case "gemma4":
            special, adds_bos = vocabulary.special_tokens(), True
            prefix = metadata.get(_P + "add_space_prefix", False)
            backend = _sentencepiece(vocabulary, vocabulary.merges(), special.get("unk_token"), prefix=prefix)
        case None:
            raise TextError(f"{_P}model is missing: the file has no tokenizer; use a complete GGUF file")
        case _:
            raise UnsupportedError(f"{_P}model is {model!r}: supported are gpt2, llama and gemma4")
    backend.add_tokens(vocabulary.added_tokens())
    set_bos_eos(
        backend,
        bos=special.get("bos_token"),
        eos=special.get("eos_token"),
        add_bos=metadata.get(_P + "add_bos_token", adds_bos and "bos_token" in special),
        add_eos=metadata.get(_P + "add_eos_token", False),
        where="GGUF metadata",
    )
    return Tokenizer(
        backend,
        special_tokens=special,
        eos_ids=vocabulary.end_ids(),
        chat_templates=_chat_templates(metadata),
        padded_size=len(vocabulary.types),
    )


class _Vocabulary:
    """The arrays, checked. `tokens` has no padding at its end; `types` covers the padding too."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        tokens = [t or f"[EMPTY_{i}]" for i, t in enumerate(self._array("tokens", str))]
        if not tokens:
            raise TextError(f"{_P}tokens is empty: the file has no vocabulary; use a complete GGUF file")
        types = self._array("token_type", int) if _P + "token_type" in metadata else [_Type.NORMAL] * len(tokens)
        self._same_length("token_type", len(types), len(tokens))
        self.types = types
        # Converters fill the vocabulary up to the embedding's rows with made-up tokens.
        size = len(tokens)
        while size and types[size - 1] == _Type.UNUSED:
            size -= 1
        self.tokens = tokens[:size]
        try:
            "".join(self.tokens).encode()
        except UnicodeEncodeError as e:
            i = next(i for i, t in enumerate(self.tokens) if e.object[e.start] in t)
            raise TextError(f"{_P}tokens[{i}] is {self.tokens[i]!r}, not valid UTF-8; convert the model again") from e
        self.ids = {t: i for i, t in enumerate(self.tokens)}
        if len(self.ids) < size:
            i, token = next((i, t) for i, t in enumerate(self.tokens) if self.ids[t] != i)
            raise TextError(f"{_P}tokens: ids {i} and {self.ids[token]} are both {token!r}; convert the model again")

    def _array(self, key: str, *kinds: type) -> list[Any]:
        value = self.metadata.get(_P + key)
        if value is None:
            raise TextError(f"{_P}{key} is missing: the file's tokenizer is incomplete; use a complete GGUF file")
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            raise TextError(f"{_P}{key} is a {type(value).__name__}, not an array; convert the model again")
        values = value.tolist() if hasattr(value, "tolist") else list(value)
        for i, v in enumerate(values):
            if not isinstance(v, kinds):
                raise TextError(f"{_P}{key}[{i}] is {v!r}, not a {kinds[0].__name__}; convert the model again")
        return values

    @staticmethod
    def _same_length(key: str, found: int, expected: int) -> None:
        if found != expected:
            raise TextError(f"{_P}{key} has {found} entries but {_P}tokens has {expected}; convert the model again")

    def merges(self) -> list[tuple[str, str]]:
        """`tokenizer.ggml.merges`, each half checked to be a token."""
        merges = []
        for i, line in enumerate(self._array("merges", str)):
            cut = line.find(" ", 1)  # from 1: in vocabularies that are not byte-level a half may start with a space
            left, right = line[:cut], line[cut + 1 :]
            if cut < 0 or left not in self.ids or right not in self.ids or left + right not in self.ids:
                raise TextError(
                    f"{_P}merges[{i}] is {line!r}, which does not join two tokens to a third; convert the model again"
                )
            merges.append((left, right))
        return merges

    def derived_merges(self) -> list[tuple[str, str]]:
        """Merges that say what `tokenizer.ggml.scores` says."""
        scores = self._array("scores", float, int)
        self._same_length("scores", len(scores), len(self.types))
        return merges_from_scores(
            self.tokens, scores, [i for i in range(len(self.tokens)) if self.types[i] == _Type.NORMAL]
        )

    def added_tokens(self) -> list[AddedToken]:
        """Tokens that are found in text before words are cut."""
        special = {_Type.CONTROL, _Type.UNKNOWN}
        return [
            AddedToken(token, special=kind in special, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=False)
            if kind in special or kind == _Type.USER_DEFINED
        ]

    def special_id(self, name: str) -> int | None:
        """`tokenizer.ggml.<name>_token_id`, None where the file has none or means a made-up token."""
        key = f"{_P}{name}_token_id"
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.types):
            raise TextError(f"{key} is {value!r}, but there are {len(self.types)} tokens; convert the model again")
        return value if value < len(self.tokens) else None

    def special_tokens(self) -> dict[str, str]:
        """The named tokens, under the names that templates use."""
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {name: self.special_id(key) for name, key in names.items()}
        return {name: self.tokens[i] for name, i in ids.items() if i is not None}

    def sentencepiece_defaults(self) -> dict[str, str]:
        """SentencePiece's usual first three tokens, which files need not name."""
        usual = (("unk_token", _Type.UNKNOWN), ("bos_token", _Type.CONTROL), ("eos_token", _Type.CONTROL))
        found = zip(usual, self.tokens, self.types, strict=False)
        return {name: token for (name, kind), token, actual in found if actual == kind}

    def end_ids(self) -> set[int]:
        """Ids that end a generation: those the file names, and tokens that can mean nothing else."""
        named = {i for name in ("eos", "eot", "eom") if (i := self.special_id(name)) is not None}
        texts = {t for t in _END_OF_TURN if t in self.ids and self.types[self.ids[t]] == _Type.CONTROL}
        if any(group <= texts for group in _END_ENDS_MESSAGE):
            texts.discard("<|end|>")
        return named | {self.ids[t] for t in texts}


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get(_P + "pre", "default")
    if name not in PRE_TOKENIZERS:
        warnings.warn(
            f"{_P}pre is {name!r}, which is not known: words are cut by the default rule, and the output may be worse; "
            "a newer version may know it",
            stacklevel=3,
        )
    return PRE_TOKENIZERS.get(name, DEFAULT)


def _byte_level(vocabulary: _Vocabulary, pre: PreTokenizer) -> tokenizers.Tokenizer:
    model = models.BPE(vocabulary.ids, vocabulary.merges(), ignore_merges=pre.whole_words)
    backend = tokenizers.Tokenizer(model)
    if normalizer := pre.normalizer():
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    vocabulary: _Vocabulary, merges: list[tuple[str, str]], unknown: str | None, *, prefix: bool
) -> tokenizers.Tokenizer:
    has_bytes = _Type.BYTE in vocabulary.types
    model = models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template`, and further ones as `tokenizer.chat_template.<name>`."""
    key = "tokenizer.chat_template"
    found = {k: v for k, v in metadata.items() if k == key or k.startswith(key + ".")}
    for k, v in found.items():
        if not isinstance(v, str):
            raise TextError(f"{k} is a {type(v).__name__}, not a string; convert the model again")
    return {k.removeprefix(key).removeprefix(".") or "default": v for k, v in found.items()}
