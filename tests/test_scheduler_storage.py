"""The expert cache over the storage package's own reader and arena."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import pytest

from colibri_offload.errors import StoreError
from colibri_offload.scheduler.cache import ExpertCache
from colibri_offload.scheduler.reader import Reader
from colibri_offload.storage.arena import Arena
from colibri_offload.storage.base import ExpertKey as K
from colibri_offload.storage.base import ExpertStore
from colibri_offload.storage.reader import AsyncReader

EXPERTS = {0: 5, 1: 5}


class MadeUpStore(ExpertStore):
    """Blocks of their key's bytes; expert 4 of layer 1 is broken."""

    def keys(self) -> Collection[K]:
        return [K(layer, expert) for layer, count in EXPERTS.items() for expert in range(count)]

    def nbytes(self, key: K) -> int:
        return 5000

    def medium_nbytes(self, key: K) -> int:
        return 4321

    def read_into(self, key: K, buffer: memoryview) -> int:
        if key == K(1, 4):
            raise StoreError(f"layer {key.layer} expert {key.expert}: broken")
        buffer[:5000] = bytes(key) * 2500
        return 4321

    def close(self) -> None:
        pass


@pytest.mark.parametrize("slots", [1, 4, 10])
def test_blocks_arrive_and_errors_stay_with_their_expert(slots):
    store, arena = MadeUpStore(), Arena(5000, slots)
    buffers = [arena.slot(i) for i in range(slots)]
    with AsyncReader(store, depth=2) as reader:
        as_protocol: Reader = reader
        cache = ExpertCache(as_protocol, 5000, buffers, EXPERTS, floor=2)
        cache.preload(store.keys() if slots < 10 else list(store.keys())[:9])
        for _ in range(3):
            for layer, count in ((0, 5), (1, 4)):
                cache.prefetch([K(1 - layer, expert) for expert in (3, 0, 1)])
                seen = []
                with cache.stream(layer, range(count)) as batches:
                    for expert, slot in itertools.chain.from_iterable(batches):
                        assert buffers[slot][:5000] == bytes([layer, expert]) * 2500
                        seen.append(expert)
                assert sorted(seen) == list(range(count))
        with pytest.raises(StoreError, match="layer 1 expert 4: broken"), cache.stream(1, [4, 0]) as batches:
            list(batches)
        with cache.stream(1, [0]) as batches:
            assert [expert for expert, _ in itertools.chain.from_iterable(batches)] == [0]
        assert cache.stats.bytes_read % 4321 == 0
        cache.close()
