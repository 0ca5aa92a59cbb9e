"""What the real-model benchmark measures, as values, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median

from colibri_offload.session import RunStats

PEER, ORIGINAL = "llama.cpp, original", "original, GGUF in place"


@dataclass
class Likeness:
    """How near an answer is to the original's. nll: mean over the original's answer, nats per token."""

    prefix_tokens: int
    agreement: float
    nll: float


@dataclass
class Variant:
    """One way to run the model, and what was measured: one entry per round in the lists."""

    name: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    likeness: Likeness | None = None
    first: RunStats | None = None  # from a cold cache
    warm: RunStats | None = None
    prefill_tokens_per_sec: list[float] = field(default_factory=list)
    decode_tokens_per_sec: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)  # share of the machine that other processes used


def ratio_to_peer(variant: Variant, peer: Variant) -> float:
    """Median over rounds of decode speed ÷ the peer's in the same round."""
    pairs = zip(variant.decode_tokens_per_sec, peer.decode_tokens_per_sec, strict=True)
    return median(own / other for own, other in pairs)


def print_texts(variants: dict[str, Variant]) -> None:
    for name, variant in variants.items():
        like = variant.likeness
        alike = (
            f"  [{like.prefix_tokens} tokens in common, {like.agreement:.0%} alike, {like.nll:.2f} nats]"
            if like
            else ""
        )
        print(f"\n--- {name}{alike}\n{variant.text}")


def print_table(variants: dict[str, Variant]) -> None:
    """Markdown, as RESULTS.md wants it."""
    print(
        "\n| | cold / warm hit rate | MB read per token, warm | stall, ms per token | prefill tok/s | decode tok/s, "
        "median (min–max) | of llama.cpp | others' CPU |\n|---|---|---|---|---|---|---|---|"
    )
    for name, v in variants.items():
        decode = v.decode_tokens_per_sec
        cells = [name, "", "", ""]
        if v.first and v.warm:
            cells[1] = f"{v.first.expert_hit_rate:.0%} / {v.warm.expert_hit_rate:.0%}"
            cells[2] = f"{v.warm.bytes_read / v.warm.generated_tokens / 1e6:.1f}"
            cells[3] = f"{v.warm.stall_sec / v.warm.generated_tokens * 1e3:.2f}"
        cells.append(f"{median(v.prefill_tokens_per_sec):.0f}")
        cells.append(f"{median(decode):.1f} ({min(decode):.1f}–{max(decode):.1f})")
        cells.append(f"{ratio_to_peer(v, variants[PEER]):.2f}" if PEER in variants else "")
        cells.append(f"≤ {max(v.others):.0%}")
        print("| " + " | ".join(cells) + " |")


def as_json(variants: dict[str, Variant], faults: list[str], setting: Mapping[str, object]) -> str:
    """Everything in one line."""
    figures = {
        name: {
            "prefill_tokens_per_sec": median(v.prefill_tokens_per_sec),
            "decode_tokens_per_sec": median(v.decode_tokens_per_sec),
            "decode_tokens_per_sec_spread": [min(v.decode_tokens_per_sec), max(v.decode_tokens_per_sec)],
            "decode_ratio_to_llama_cpp": ratio_to_peer(v, variants[PEER]) if PEER in variants else None,
            "cpu_share_of_others": max(v.others),
            "likeness": asdict(v.likeness) if v.likeness else None,
            "warm_stats": asdict(v.warm) if v.warm else None,
        }
        for name, v in variants.items()
    }
    return json.dumps({"benchmark": "real_model", **setting, "faults": faults, "variants": figures})
