"""One tokenizer for every checkpoint: text ↔ ids, and chats → prompts."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from colibri_offload.errors import TextError
from colibri_offload.text.neutral import Neutraliser
from colibri_offload.text.pieces import PieceRule
from colibri_offload.text.posts import added_around
from colibri_offload.text.template import ChatTemplate


class Tokenizer:
    """A `tokenizers.Tokenizer` with the facts that the library does not keep: bos, eos and chat templates.

    Built by `hub.from_directory` and `gguf.from_gguf`. Every method may be called from several threads at once.

    special_tokens   what templates know by name: "bos_token", "eos_token", "unk_token", "pad_token" … → the token's
                     string ("additional_special_tokens" → a list of strings).
    eos_ids          ids that end a generation; the eos token itself is always among them.
    chat_templates   name → Jinja source; the one called "default" is used, or "tool_use" where tools are given.
    padded_size      rows of the model's embedding. Ids from `vocab_size` up to it are padding and decode to nothing.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str | list[str]] | None = None,
        eos_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        padded_size: int = 0,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        # Switching between "special tokens are tokens" and "are text" changes the backend, so it takes turns.
        self._lock = threading.Lock()
        self._normalizer = backend.normalizer
        before, after = added_around(backend)
        self._around = len(before), len(after)
        self._rule = PieceRule.from_decoder(backend.decoder)
        self._bytes: dict[int, bytes] = {}
        self._templates: dict[str, ChatTemplate] = {}

        added = backend.get_added_tokens_decoder()
        self.vocab_size: int = max([backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)])
        self.padded_size = max(padded_size, self.vocab_size)
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self._special_strings = {i: added[i].content for i in self.special_ids}
        self._neutraliser = Neutraliser(self._special_strings.values())

        self.special_tokens: Mapping[str, str | list[str]] = dict(special_tokens or {})
        self.bos_id = self._named_id("bos_token")
        self.unk_id = self._named_id("unk_token")
        eos = self._named_id("eos_token")
        self.eos_ids: frozenset[int] = frozenset(eos_ids) | (frozenset() if eos is None else {eos})
        self.chat_templates: Mapping[str, str] = dict(chat_templates or {})

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return self._backend.token_to_id(token) if isinstance(token, str) else None

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the default chat template, None when the model has none."""
        return self.chat_templates.get("default")

    def encode(self, text: str, *, add_special: bool = True, allow_special: bool = False) -> list[int]:
        """Token ids of `text`.

        add_special     put bos (and eos) around it where the model was trained so; at most one of each.
        allow_special   special-token strings in `text` become control tokens. Off by default: text from users stays
                        text. (Added tokens that are not control tokens, "<think>" for one, are found either way, as
                        they are by Hugging Face's `split_special_tokens` and llama.cpp.)
        Raises TextError when `text` is not valid Unicode.
        """
        ids = self._encode(text, add_special=add_special, allow_special=allow_special)
        if allow_special or self.special_ids.isdisjoint(ids):
            return ids
        start, end = self._around if add_special else (0, 0)
        body = ids[start : len(ids) - end]
        return ids[:start] + self._spell_out(body) + ids[len(ids) - end :]

    def _encode(self, text: str, *, add_special: bool, allow_special: bool, removing: str | None = None) -> list[int]:
        """`removing` is a mark that is deleted from the text after special tokens have been split off."""
        _check_unicode(text)
        with self._lock:
            self._backend.encode_special_tokens = not allow_special
            if removing is None:
                return self._backend.encode(text, add_special_tokens=add_special).ids
            steps = [normalizers.Replace(removing, "")] + ([self._normalizer] if self._normalizer else [])
            self._backend.normalizer = normalizers.Sequence(steps)
            try:
                return self._backend.encode(text, add_special_tokens=add_special).ids
            finally:
                self._backend.normalizer = self._normalizer

    def _spell_out(self, ids: list[int]) -> list[int]:
        """`ids` with every control token replaced by tokens for its characters.

        Needed where merges (rather than the splitter) build a control token from plain text, as in vocabularies that
        list "<s>" among their ordinary pieces. The unknown token stays: it stands for text that has no token.
        """
        out: list[int] = []
        for i in ids:
            if i in self.special_ids and i != self.unk_id:
                with self._lock:
                    out += [t.id for c in self._special_strings[i] for t in self._backend.model.tokenize(c)]
            else:
                out.append(i)
        return out

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. Raises TextError for an id outside the model's range.

        Differs from Hugging Face's decode in two things: byte tokens that are not UTF-8 spoil only themselves, not
        their valid neighbours, and spaces before punctuation are never "cleaned up": a stream could do neither.
        """
        kept = [i for i in ids if not (skip_special and i in self.special_ids)]
        return self.strip(b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace"))

    def strip(self, text: str) -> str:
        """`text`, decoded from the first token on, without the space that encoding had put in front."""
        return self._rule.strip(text)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token, not always whole characters. Padding has none. TextError for an id out of range."""
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        if not 0 <= token_id < self.padded_size:
            raise TextError(
                f"token id {token_id} is outside 0…{self.padded_size - 1}; the tokenizer does not belong to this model"
            )
        with self._lock:
            token = self._backend.id_to_token(int(token_id))
        data = b"" if token is None else self._rule.to_bytes(token)
        self._bytes[token_id] = data
        return data

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The prompt text of a chat, as Hugging Face's `apply_chat_template(…, tokenize=False)` writes it.

        `messages` are {"role": …, "content": …} in order; `tools` JSON schemas of functions; `extra` further variables
        of the template ("enable_thinking", "documents" …). Raises TextError when there is no template or it refuses.
        """
        if not all(isinstance(m, Mapping) for m in messages) or isinstance(messages, Mapping):
            raise TextError('messages: must be a list of objects such as {"role": "user", "content": "Hi"}')
        variables = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._template(tools).render(**(variables | dict(self.special_tokens) | extra))

    def _template(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        name = "tool_use" if tools and "tool_use" in self.chat_templates else "default"
        if name not in self.chat_templates:
            found = f" (only {', '.join(sorted(self.chat_templates))})" if self.chat_templates else ""
            raise TextError(f"the model has no {name} chat template{found}; pass --raw to send the prompt as it is")
        if name not in self._templates:
            self._templates[name] = ChatTemplate(self.chat_templates[name])
        return self._templates[name]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> list[int]:
        """Ids of a chat. The template's own markers become control tokens, and it alone decides about bos.

        Equals `encode(render_chat(…), add_special=False, allow_special=True)`, which is Hugging Face's way, unless a
        message, a tool or an extra variable contains a special-token string: that stays ordinary text.
        """
        variables: dict[str, Any] = {"messages": messages, "tools": tools, "extra": extra}
        mark = self._neutraliser.mark_for(variables)
        if mark is not None:
            variables = self._neutraliser.apply(variables, mark)
        text = self.render_chat(
            variables["messages"],
            tools=variables["tools"],
            add_generation_prompt=add_generation_prompt,
            **variables["extra"],
        )
        return self._encode(text, add_special=False, allow_special=True, removing=mark)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; `hub.from_directory` restores an equal
        tokenizer.

        Hugging Face reads the files too; it ignores the two keys that are ours (eos_token_ids, padded_vocab_size).
        """
        start, end = self._around
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": start > 0,
            "add_eos_token": end > 0,
            "eos_token_ids": sorted(self.eos_ids),
            "padded_vocab_size": self.padded_size,
            **self.special_tokens,
        }
        names = set(self.chat_templates)
        if names - {"default"}:
            config["chat_template"] = [{"name": n, "template": t} for n, t in self.chat_templates.items()]
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._backend.encode_special_tokens = False
            backend = self._backend.to_str(pretty=False)
        _write(folder / "tokenizer.json", backend)
        _write(folder / "tokenizer_config.json", json.dumps(config, ensure_ascii=False, indent=2))
        if names == {"default"}:
            _write(folder / "chat_template.jinja", self.chat_templates["default"])


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        half = text[e.start]
        raise TextError(f"prompt, character {e.start}: {half!r} is half a surrogate pair; give valid Unicode") from e


def _write(path: Path, text: str) -> None:
    """All of the file or none of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as f:
            f.write(text.encode())
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
