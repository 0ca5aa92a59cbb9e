"""colibri inspect: what a model is and how large its parts are."""

from __future__ import annotations

from typing import Any

from colibri_offload.cli.flags import Json, ModelArgument
from colibri_offload.cli.output import print_json, table


def inspect(model: ModelArgument, json: Json = False) -> None:
    """Show architecture, formats and sizes. No weights are read."""
    from contextlib import closing

    from colibri_offload.cli.facts import model_facts  # late: --help needs no compiler
    from colibri_offload.convert.rows import make_packer
    from colibri_offload.models import open_model

    source, load_tokenizer = open_model(model, make_packer())
    with closing(source):
        facts = model_facts(source, load_tokenizer)
    if json:
        print_json(facts)
    else:
        print(_text(facts))


def _text(facts: dict[str, Any]) -> str:
    from colibri_offload.scheduler.memory import format_size as size

    f = facts
    experts = f"{f['experts_per_layer']} in each of {f['moe_layers']} layers, {f['top_k']} per token"
    tokenizer = f["tokenizer"]
    words = f"{tokenizer['vocab']} tokens, {'a' if tokenizer['chat_template'] else 'no'} chat template" if (
        "vocab" in tokenizer
    ) else f"none ({tokenizer['error']})"  # fmt: skip
    rows = [
        ("model", f"{f['model']} ({f['kind']}, {size(f['file_bytes'])} of files)"),
        ("architecture", f["family"]),
        ("layers", f"{f['layers']} with {f['attention']} attention, hidden size {f['hidden']}"),
        ("experts", experts if f["moe_layers"] else "none: feed-forward layers are streamed as one block each"),
        ("vocabulary", f["vocab"]),
        ("context", f["max_context"]),
        ("tokenizer", words),
        *((k, v) for k, v in [("converted", _origin(f["provenance"]))] if v),
    ]
    groups = [(g["group"], ", ".join(g["formats"]), size(g["bytes"])) for g in f["groups"]]
    least, block = f["least_cached_blocks"], f["expert_block_bytes"]
    memory = [
        ("always resident", size(f["resident_bytes"])),
        ("streamed on demand", f"{size(f['expert_bytes'])} in {f['expert_blocks']} blocks of {size(block)}"),
        ("at least cached", f"{least} blocks, {size(least * block)}"),
        ("all in memory", size(f["total_bytes"])),
    ]
    left = [(f"{key}:", value) for key, value in rows]
    return "\n".join([table(left), "", "weights in memory", table(groups, "  "), "", "memory", table(memory, "  ")])


def _origin(provenance: dict[str, Any] | None) -> str:
    if not provenance:
        return ""
    return f"from {provenance['source']} to {provenance['quant']} by {provenance['tool']} on {provenance['date']}"
