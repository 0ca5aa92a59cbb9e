"""What can be said about a model without loading its weights."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from colibri_offload.errors import ColibriError
from colibri_offload.families.spec import LatentAttention, MoE
from colibri_offload.graph.layout import ExpertLayout, Layout, VectorLayout
from colibri_offload.graph.source import CheckpointSource, ModelSource, StoreSource
from colibri_offload.models import TokenizerLoader

_GROUPS = {
    "embed": "embedding",
    "head": "head",
    "router": "routers",
    "shared_gate": "routers",
    "shared": "shared experts",
}
EXPERTS = "experts"


def model_facts(source: ModelSource, load_tokenizer: TokenizerLoader) -> dict[str, Any]:
    """A JSON object; sizes in bytes, as the weights will lie in memory."""
    spec, counts = source.spec, source.experts_per_layer
    moe = [layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoE)]
    expert_nbytes = sum(source.expert_layouts[i].nbytes * n for i, n in counts.items())
    top_k = max((ffn.top_k for ffn in moe), default=0)
    return {
        "model": source.path.resolve().name,
        "kind": source.kind,
        "family": spec.family,
        "layers": len(spec.layers),
        "moe_layers": len(moe),
        "hidden": spec.hidden,
        "vocab": spec.vocab,
        "max_context": spec.max_context,
        "attention": "latent" if isinstance(spec.layers[0].mixer, LatentAttention) else "grouped-query",
        "experts_per_layer": max((ffn.experts for ffn in moe), default=0),
        "top_k": top_k,
        "groups": _groups(source),
        "file_bytes": sum(path.stat().st_size for path in _files(source)),
        "resident_bytes": source.resident_nbytes,
        "expert_bytes": expert_nbytes,
        "total_bytes": source.resident_nbytes + expert_nbytes,
        "expert_blocks": sum(counts.values()),
        "expert_block_bytes": source.slot_nbytes,
        "least_cached_blocks": min(sum(counts.values()), max(1, top_k)),
        "tokenizer": _tokenizer(load_tokenizer),
        "provenance": source.model.get("provenance") if isinstance(source, StoreSource) else None,
    }


def _files(source: ModelSource) -> list[Path]:
    if isinstance(source, CheckpointSource):
        return list(source.checkpoint.files)
    return [path for path in source.path.rglob("*") if path.is_file()]


def _groups(source: ModelSource) -> list[dict[str, Any]]:
    """Formats and bytes by what the tensors are for, in the order in which a token meets them."""
    nbytes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for name, layout in source.residents.items():
        _add(nbytes[_group(name, layout)], layout, 1)
    for layer, count in source.experts_per_layer.items():
        _add(nbytes[EXPERTS], source.expert_layouts[layer], count)
    return [{"group": g, "formats": dict(f), "bytes": sum(f.values())} for g, f in nbytes.items()]


def _group(name: str, layout: Layout | ExpertLayout) -> str:
    slot = name.split(".", 2)[2] if name.startswith("layers.") else name
    if isinstance(layout, VectorLayout):
        return "vectors"
    return _GROUPS.get(slot, "dense feed-forward" if slot == "ffn" else "attention")


def _add(formats: dict[str, int], layout: Layout | ExpertLayout, count: int) -> None:
    if isinstance(layout, ExpertLayout):
        down = layout.groups * layout.down.group_nbytes(layout.intermediate)
        gate, up = (2 * layout.hidden_blocks * n for n in (layout.gate_group, layout.up_group))
        for fmt, n in ((layout.gate, gate), (layout.up, up), (layout.down, down)):
            formats[fmt.name] += n * count
        if layout.bias:
            formats["F32"] += (layout.nbytes - layout.bias_at) * count
    else:
        formats["F32" if isinstance(layout, VectorLayout) else layout.fmt.name] += layout.nbytes * count


def _tokenizer(load: TokenizerLoader) -> dict[str, Any]:
    try:
        tokenizer = load()
    except ColibriError as error:
        return {"error": str(error)}
    return {
        "vocab": tokenizer.vocab_size,
        "chat_template": tokenizer.chat_template is not None,
        "eos_ids": sorted(tokenizer.eos_ids),
    }
