"""Real readers over blocks that are made up from their key: one stepped by hand, one with threads."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

from colibri_offload.storage.base import ExpertKey

BLOCK = 64
MEDIUM_BYTES = 100  # what a read reports, unlike BLOCK on purpose


def content(key: ExpertKey) -> bytes:
    return bytes([key.layer, key.expert]) * (BLOCK // 2)


def make_slots(count: int) -> list[memoryview]:
    return [memoryview(bytearray(BLOCK)) for _ in range(count)]


class SteppedReader:
    """Reads end when the test says so: finish(key), fail(key). Cancellable until begin(key)."""

    def __init__(self) -> None:
        self.queued: dict[ExpertKey, tuple[Future[int], memoryview]] = {}
        self.demand: dict[ExpertKey, bool] = {}
        self.begun: set[ExpertKey] = set()
        self.reads: Counter[ExpertKey] = Counter()

    def submit(self, key: ExpertKey, buffer: memoryview, demand: bool) -> Future[int]:
        assert key not in self.queued, f"{key} is read twice at once"
        future: Future[int] = Future()
        self.queued[key], self.demand[key] = (future, buffer), demand
        self.reads[key] += 1
        return future

    def promote(self, future: Future[int]) -> None:
        self.demand[self._key(future)] = True

    def cancel(self, future: Future[int]) -> bool:
        key = self._key(future)
        if key in self.begun:
            return False
        del self.queued[key]
        return future.cancel()

    def begin(self, key: ExpertKey) -> None:
        self.begun.add(key)
        self.queued[key][0].set_running_or_notify_cancel()

    def finish(self, *keys: ExpertKey) -> None:
        for key in keys:
            future, buffer = self._end(key)
            buffer[:] = content(key)
            future.set_result(MEDIUM_BYTES)

    def fail(self, key: ExpertKey, error: Exception) -> None:
        self._end(key)[0].set_exception(error)

    def _end(self, key: ExpertKey) -> tuple[Future[int], memoryview]:
        self.begun.discard(key)
        return self.queued.pop(key)

    def _key(self, future: Future[int]) -> ExpertKey:
        return next(key for key, (queued, _) in self.queued.items() if queued is future)


class ThreadedReader:
    """Threads fill a buffer in two halves with a pause between; demand first. `error_of(key, nth read)` may fail it."""

    def __init__(
        self,
        threads: int = 3,
        pause_sec: Callable[[], float] = lambda: 0.0,
        error_of: Callable[[ExpertKey, int], Exception | None] = lambda key, nth: None,
    ) -> None:
        self.reads: Counter[ExpertKey] = Counter()
        self._pause_sec, self._error_of = pause_sec, error_of
        self._order = itertools.count()
        self._queue: queue.PriorityQueue = queue.PriorityQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, key: ExpertKey, buffer: memoryview, demand: bool) -> Future[int]:
        future: Future[int] = Future()
        self._queue.put((not demand, next(self._order), key, buffer, future))
        return future

    def promote(self, future: Future[int]) -> None:
        with self._queue.mutex:
            entries = self._queue.queue
            for i, entry in enumerate(entries):
                if entry[4] is future:
                    entries[i] = (False, *entry[1:])
            entries.sort(key=lambda entry: entry[:2])  # a sorted list is a heap

    def cancel(self, future: Future[int]) -> bool:
        return future.cancel()

    def stop(self) -> None:
        for _ in self._threads:
            self._queue.put((True, next(self._order), None, None, None))
        for thread in self._threads:
            thread.join(5)

    def _work(self) -> None:
        while True:
            _, _, key, buffer, future = self._queue.get()
            if key is None:
                return
            if not future.set_running_or_notify_cancel():
                continue
            self.reads[key] += 1
            nth = self.reads[key]
            half = BLOCK // 2
            buffer[:half] = content(key)[:half]
            time.sleep(self._pause_sec())
            error = self._error_of(key, nth)
            if error is not None:
                future.set_exception(error)
                continue
            buffer[half:] = content(key)[half:]
            future.set_result(MEDIUM_BYTES)
