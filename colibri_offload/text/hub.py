"""The tokenizer of a Hugging Face model directory.

Read are tokenizer.json (or vocab.json with merges.txt), tokenizer_config.json, special_tokens_map.json, the chat
template files, and, for the ids that end a generation, generation_config.json and config.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from colibri_offload.errors import TextError
from colibri_offload.text.posts import set_bos_eos
from colibri_offload.text.pretokenizers import PRE_TOKENIZERS
from colibri_offload.text.tokenizer import Tokenizer

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Classes of Hugging Face's that put bos in front unless the configuration says no, whatever tokenizer.json does.
_BOS_CLASSES = frozenset(
    c + f for c in ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer") for f in ("", "Fast")
)
# What vocab.json + merges.txt leave open, by class.
_PRE_OF_CLASS = {
    "Qwen2Tokenizer": "qwen2",
    "Qwen2TokenizerFast": "qwen2",
    "GPT2Tokenizer": "gpt-2",
    "GPT2TokenizerFast": "gpt-2",
}
_OTHER_FORMATS = ("tokenizer.model", "tiktoken.model", "tekken.json", "spiece.model", "sentencepiece.bpe.model")


def from_directory(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in directory `path`. Raises TextError naming the file, and what is missing or wrong in it."""
    folder = Path(path)
    config = _read(folder / "tokenizer_config.json")
    special = _special_tokens(
        _read(folder / "special_tokens_map.json") | {k: v for k, v in config.items() if v is not None}
    )
    backend = _backend(folder, config)
    _add_tokens(backend, config, folder / "tokenizer_config.json")
    for name in ("bos_token", "eos_token"):
        token = special.get(name)
        if isinstance(token, str) and backend.token_to_id(token) is None:
            raise TextError(
                f"{folder / 'tokenizer_config.json'}: {name} {token!r} is not in the vocabulary; correct the file"
            )

    add_bos, add_eos = config.get("add_bos_token"), config.get("add_eos_token")
    if add_bos is None and config.get("tokenizer_class") in _BOS_CLASSES:
        add_bos = True
    set_bos_eos(
        backend,
        bos=_text(special.get("bos_token")),
        eos=_text(special.get("eos_token")),
        add_bos=add_bos,
        add_eos=add_eos,
        where=str(folder / "tokenizer_config.json"),
    )
    model_config = _read(folder / "config.json")
    if isinstance(inner := model_config.get("text_config"), dict):  # models that also see or hear
        model_config = model_config | inner
    sizes = (model_config.get("vocab_size"), config.get("padded_vocab_size"))
    return Tokenizer(
        backend,
        special_tokens=special,
        eos_ids=_eos_ids(folder, config, model_config),
        chat_templates=_chat_templates(folder, config),
        padded_size=max(n for n in (0, *sizes) if isinstance(n, int)),
    )


def _read(path: Path) -> dict[str, Any]:
    """A JSON object, {} when there is no such file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        raise TextError(f"{path}: cannot be read as JSON ({e}); download it again") from e
    if not isinstance(value, dict):
        raise TextError(f"{path}: holds a {type(value).__name__}, not an object; download it again")
    return value


def _text(token: Any) -> str | None:
    """A token's string, which files write as itself or as {"content": …}."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str | list[str]]:
    found: dict[str, str | list[str]] = {n: t for n in _NAMES if (t := _text(config.get(n))) is not None}
    additional = config.get("additional_special_tokens")
    if isinstance(additional, list) and additional:
        found["additional_special_tokens"] = [t for a in additional if (t := _text(a)) is not None]
    return found


def _backend(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    whole, vocab, merges = (folder / n for n in ("tokenizer.json", "vocab.json", "merges.txt"))
    if whole.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(whole))
        except Exception as e:  # the library raises nothing narrower
            raise TextError(f"{whole}: {' '.join(str(e).split())}; download it again") from e
    if vocab.is_file() and merges.is_file():
        return _from_merges(vocab, merges, config)
    other = [n for n in _OTHER_FORMATS if (folder / n).is_file()]
    if other:
        raise TextError(
            f"{folder}: has {other[0]} but no tokenizer.json; make one with transformers' AutoTokenizer.save_pretrained"
        )
    missing = (
        f"{merges.name} (for {vocab.name})"
        if vocab.is_file()
        else f"tokenizer.json, nor {vocab.name} with {merges.name}"
    )
    raise TextError(f"{folder}: no {missing}; download the model's tokenizer files")


def _from_merges(vocab: Path, merges: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Byte-level BPE from the two older files; the class in tokenizer_config.json says how words are cut."""
    kind = config.get("tokenizer_class")
    if kind not in _PRE_OF_CLASS:
        raise TextError(
            f"{vocab.parent}: no tokenizer.json, and tokenizer_class {kind!r} does not say how to use {vocab.name} "
            f"({', '.join(sorted(_PRE_OF_CLASS))} do); download tokenizer.json"
        )
    pre = PRE_TOKENIZERS[_PRE_OF_CLASS[kind]]
    try:
        model = models.BPE.from_file(str(vocab), str(merges))
    except Exception as e:  # the library raises nothing narrower
        raise TextError(f"{vocab} and {merges.name}: {' '.join(str(e).split())}; download them again") from e
    backend = tokenizers.Tokenizer(model)
    if normalizer := pre.normalizer():
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], path: Path) -> None:
    """`added_tokens_decoder`: tokens that tokenizer.json may lack."""
    known = {t.content for t in backend.get_added_tokens_decoder().values()}
    try:
        wanted = sorted((int(i), dict(spec)) for i, spec in (config.get("added_tokens_decoder") or {}).items())
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        missing = [
            (i, AddedToken(s["content"], **{f: s[f] for f in flags if f in s}))
            for i, s in wanted
            if s["content"] not in known
        ]
    except (TypeError, ValueError, KeyError, AttributeError) as e:
        raise TextError(
            f"{path}: added_tokens_decoder is malformed ({type(e).__name__}: {e}); download it again"
        ) from e
    backend.add_tokens([token for _, token in missing])
    for i, token in missing:
        found = backend.token_to_id(token.content)
        if found != i:
            raise TextError(
                f"{path}: added token {token.content!r} has id {i}, but {found} in the vocabulary; correct the file"
            )


def _eos_ids(folder: Path, config: Mapping[str, Any], model_config: Mapping[str, Any]) -> set[int]:
    """From our own key, else from generation_config.json, else from config.json, as Hugging Face's `generate` does."""
    sources = [
        (folder / "tokenizer_config.json", config.get("eos_token_ids")),
        (folder / "generation_config.json", _read(folder / "generation_config.json").get("eos_token_id")),
        (folder / "config.json", model_config.get("eos_token_id")),
    ]
    path, value = next(((p, v) for p, v in sources if v is not None), (folder, []))
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise TextError(f"{path}: eos_token_id is {value!r}, not an id or a list of ids; correct the file")
    return set(ids)


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files take precedence over tokenizer_config.json, as they do for Hugging Face."""
    config_path = folder / "tokenizer_config.json"
    templates: dict[str, str] = {}
    for source in (config.get("chat_template"), _read(folder / "chat_template.json").get("chat_template")):
        if isinstance(source, str):
            templates["default"] = source
        elif isinstance(source, list):
            for entry in source:
                strings = isinstance(entry, Mapping) and all(
                    isinstance(entry.get(k), str) for k in ("name", "template")
                )
                if not strings:
                    raise TextError(f"{config_path}: a chat_template lacks its name or template; correct the file")
                templates[entry["name"]] = entry["template"]
    files = [*sorted(folder.glob("additional_chat_templates/*.jinja")), folder / "chat_template.jinja"]
    for file in files:
        if file.is_file():
            name = "default" if file.parent == folder else file.stem
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as e:
                raise TextError(f"{file}: cannot be read ({e}); download it again") from e
    return templates
