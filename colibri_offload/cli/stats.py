"""The statistics of a run as rows for a table."""

from __future__ import annotations

from colibri_offload.scheduler.memory import format_size
from colibri_offload.session import RunStats


def cache_rows(s: RunStats) -> list[tuple[str, str]]:
    """What the expert cache did."""
    return [
        ("expert hits", f"{s.expert_hits}"),
        ("expert misses", f"{s.expert_misses}"),
        ("hit rate", f"{s.expert_hit_rate:.1%}"),
        ("bytes read", format_size(s.bytes_read)),
        ("prefetch used", format_size(s.prefetch_bytes_used)),
        ("prefetch wasted", format_size(s.prefetch_bytes_wasted)),
        ("decode tokens/s", f"{s.decode_tokens_per_sec:.1f}"),
    ]


def all_rows(s: RunStats) -> list[tuple[str, str]]:
    """Every field of RunStats."""
    return [
        ("prompt tokens", f"{s.prompt_tokens}"),
        ("generated tokens", f"{s.generated_tokens} ({s.finish_reason or 'stopped'})"),
        ("time to first token", f"{s.ttft_sec:.3f} s"),
        ("prefill tokens/s", f"{s.prefill_tokens_per_sec:.1f}"),
        *cache_rows(s),
        ("predictor recall", f"{s.predictor_recall:.1%}"),
        ("waited for experts", f"{s.stall_sec:.3f} s"),
        ("peak memory", f"{format_size(s.peak_memory_bytes)} of {format_size(s.memory_budget_bytes)}"),
    ]
