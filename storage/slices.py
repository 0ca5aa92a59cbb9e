"""Experts read where they lie in any model file: nothing is converted, the caller's repacking makes the block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from colibri_offload.storage.base import ExpertKey
from colibri_offload.storage.plan import PlannedStore, ReadPlan, Slice, coalesce

Finish = Callable[[ExpertKey, list[memoryview], memoryview], None]


class SliceStore(PlannedStore):
    """Blocks made from slices of files.

    `records`: for each key (path, offset, nbytes) slices. `nbytes`: size of a block, one for all keys or one per key.
    `finish(key, raws, out)`: fills out[:nbytes] from the slices' bytes, in the order of the record; the raws are
    valid during the call only; several threads call it at once. It raises ColibriError for bytes it cannot use.
    Errors: StoreError names file and key; CorruptRecordError when a file ends too early.
    """

    def __init__(
        self, records: Mapping[ExpertKey, Sequence[Slice]], finish: Finish, *, nbytes: int | Mapping[ExpertKey, int]
    ) -> None:
        super().__init__("model files")
        self._plans = {key: coalesce(Slice(*part) for part in parts) for key, parts in records.items()}
        self._nbytes = {key: nbytes if isinstance(nbytes, int) else nbytes[key] for key in records}
        self._finish = finish

    def keys(self) -> Collection[ExpertKey]:
        return self._plans.keys()

    def nbytes(self, key: ExpertKey) -> int:
        return self._nbytes[key]

    def plan(self, key: ExpertKey) -> ReadPlan:
        return self._plans[key]

    def finish(self, key: ExpertKey, raws: list[memoryview], out: memoryview) -> None:
        self._finish(key, raws, out)
