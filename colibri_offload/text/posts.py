"""Bos and eos around a text: what the tokenizer does, and making it do what the model's configuration says."""

from __future__ import annotations

import tokenizers
from tokenizers import processors

from colibri_offload.errors import TextError


def added_around(backend: tokenizers.Tokenizer) -> tuple[list[str], list[str]]:
    """The tokens that `backend` puts before and after a text."""
    encoding = backend.encode("a")
    mask = encoding.special_tokens_mask
    start = mask.index(0) if 0 in mask else len(mask)
    return encoding.tokens[:start], encoding.tokens[start + mask.count(0) :]


def set_bos_eos(
    backend: tokenizers.Tokenizer,
    *,
    bos: str | None,
    eos: str | None,
    add_bos: bool | None,
    add_eos: bool | None,
    where: str,
) -> None:
    """Make `backend` add exactly one bos (eos) where asked, none where refused; None leaves it as it is.

    `where` names the source of the flags in errors: TextError when a token is to be added that does not exist.
    """
    before, after = added_around(backend)
    wanted_before = before if add_bos is None else _wanted(add_bos, bos, "bos", where)
    wanted_after = after if add_eos is None else _wanted(add_eos, eos, "eos", where)
    if (before, after) == (wanted_before, wanted_after):
        return
    around = {token: backend.token_to_id(token) for token in [*wanted_before, *wanted_after]}
    backend.post_processor = processors.TemplateProcessing(
        single=[*wanted_before, "$A", *wanted_after],
        pair=[
            *wanted_before,
            "$A",
            *wanted_after,
            *(f"{t}:1" for t in wanted_before),
            "$B:1",
            *(f"{t}:1" for t in wanted_after),
        ],
        special_tokens=list(around.items()),
    )


def _wanted(add: bool, token: str | None, name: str, where: str) -> list[str]:
    if not add:
        return []
    if token is None:
        raise TextError(f"{where}: add_{name}_token is true but there is no {name} token; name one or set it to false")
    return [token]
