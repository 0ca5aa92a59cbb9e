"""Which quantised modules keep their own format: those whose siblings can, too, and whose mapping is proved exact.

Shapes and types decide nearly always. Where values do (scales that must be float16 numbers, zero points that must be
the middle), the small tensors that hold them are read once, on opening, unless they are too many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from colibri_offload.checkpoint.base import FileSlice, Tensor, read_slice
from colibri_offload.checkpoint.hub_types import Stored, as_float32

MAX_PROOF_BYTES = 1 << 30  # of all proofs together: a second or so, if the drive is as quick
PIECE_BYTES = 64 << 10  # temporaries stay in the cache and on the heap: three times as fast as 1 MiB


@dataclass(frozen=True)
class Proof:
    """Values that decide whether a block format is exact: `holds` must say so of every piece of `stored`'s bytes."""

    stored: Stored
    holds: Callable[[memoryview], bool]

    def read(self) -> bool:
        return all(self.holds(memoryview(read_slice(piece))) for piece in _pieces(self.stored.slice))


@dataclass(frozen=True)
class Candidate:
    """A logical tensor, and the same in a block format where shapes and types allow one and `proofs` confirm it."""

    plain: Tensor
    blocks: Tensor | None = None
    proofs: tuple[Proof, ...] = ()


def float16_proofs(scales: Stored) -> tuple[Proof, ...]:
    """What proves that every scale is a float16 number; nothing for scales that are stored as such."""
    return () if scales.dtype == "F16" else (Proof(scales, lambda raw: _are_float16(as_float32(raw, scales.dtype))),)


def settle(candidates: Sequence[Candidate]) -> dict[str, Tensor]:
    """One tensor for every candidate, by name: in the block format if it and all its siblings can, else plain.

    Siblings differ only in the last number of their names, as the experts of a layer do: the engine keeps these in one
    layout. Raises CheckpointError when a file has gone or shrunk.
    """
    siblings: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        siblings.setdefault(_without_last_number(candidate.plain.name), []).append(candidate)
    possible = {name: members for name, members in siblings.items() if _agree(members)}
    total = sum(p.stored.slice.nbytes for members in possible.values() for p in _proofs(members))
    chosen = {
        name
        for name, members in possible.items()
        if all(total <= MAX_PROOF_BYTES and proof.read() for proof in _proofs(members))
    }
    out = {}
    for name, members in siblings.items():
        for c in members:
            blocks = c.blocks if name in chosen else None
            out[c.plain.name] = c.plain if blocks is None else _with_float32(blocks, c.plain)
    return out


def _agree(members: list[Candidate]) -> bool:
    formats = {c.blocks and c.blocks.fmt for c in members}
    return len(formats) == 1 and None not in formats


def _proofs(members: list[Candidate]) -> Iterator[Proof]:
    return (proof for c in members for proof in c.proofs)


def _with_float32(blocks: Tensor, plain: Tensor) -> Tensor:
    narrow = blocks.narrow
    entry = None if narrow is None else lambda i: _with_float32(narrow(i), plain.index(i))
    return replace(blocks, to_float32=lambda: plain, narrow=entry)


def _without_last_number(name: str) -> str:
    """The name with its last part that is a number left blank: experts.7.w1 → experts..w1."""
    parts = name.split(".")
    for i in reversed(range(len(parts))):
        if parts[i].isdecimal():
            parts[i] = ""
            break
    return ".".join(parts)


def _pieces(whole: FileSlice) -> Iterator[FileSlice]:
    for start in range(0, whole.nbytes, PIECE_BYTES):
        yield FileSlice(whole.path, whole.offset + start, min(PIECE_BYTES, whole.nbytes - start))


def _are_float16(values: np.ndarray) -> bool:
    magnitude = np.abs(values)
    if magnitude.min() >= 2.0**-14 and magnitude.max() <= 65504:  # normal ones differ in the mantissa only
        return not (values.view(np.uint32) & 0x1FFF).any()
    with np.errstate(over="ignore"):  # beyond float16 is Inf, which differs
        return bool((values.astype(np.float16) == values).all())
