"""What the expert cache did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class CacheStats:
    """Totals since the cache was made; `later - earlier` gives what happened between two snapshots.

    A hit is an expert that was resident when its layer asked for it; one whose prefetch was still in flight is a miss,
    though it is not read again. A prefetch is used when the next pass of its layer asks for it, and wasted when that
    pass does not, or when the block is evicted or given up before. What is neither yet is still expected.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_read: int = 0
    stall_seconds: float = 0.0
    prefetch_issued: int = 0
    prefetch_bytes_read: int = 0
    prefetch_bytes_used: int = 0
    prefetch_bytes_wasted: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of requested experts that were resident; 0 when none was requested."""
        return self.hits / max(1, self.hits + self.misses)

    def __sub__(self, earlier: CacheStats) -> CacheStats:
        return CacheStats(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})
