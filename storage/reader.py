"""Asynchronous reads of expert blocks: bounded in flight, demand before prefetch, each failure for its own future."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import Self

from aiofiles.os import wrap

from colibri_offload.errors import ColibriError, StoreError, UsageError
from colibri_offload.storage.arena import ALIGNMENT, address_of, round_up
from colibri_offload.storage.base import ExpertKey, ExpertStore, key_name
from colibri_offload.storage.direct import DirectPolicy, Io
from colibri_offload.storage.failure import is_eio
from colibri_offload.storage.plan import PlannedStore
from colibri_offload.storage.read_queue import ReadQueue, ReadRequest
from colibri_offload.storage.read_slot import ReadSlot
from colibri_offload.storage.reader_stats import ReaderMeter, ReaderStats


class AsyncReader:
    """Reads blocks of `store` into the caller's buffers, on a thread of its own with an event loop.

    `depth`: reads in flight at once. `io`: "direct" and "auto" pass by the page cache wherever the filesystem allows
    (for a PlannedStore; other stores read as they like), "buffered" goes through it. `close_timeout_sec`: how long
    close() waits for reads in flight. The store stays the caller's and must outlive the reader.
    Callbacks of the futures run on the reader's thread and must be short. Every method is safe for several threads.
    """

    def __init__(self, store: ExpertStore, depth: int = 4, io: Io = "auto", *, close_timeout_sec: float = 5.0) -> None:
        if depth < 1:
            raise UsageError(f"queue depth {depth}: at least one read must be in flight")
        if io not in ("auto", "direct", "buffered"):
            raise UsageError(f"--io {io}: use auto, direct or buffered")
        self.depth = depth
        self._store = store
        self._close_timeout_sec = close_timeout_sec
        self._queue = ReadQueue()
        self._meter = ReaderMeter()
        self._executor = ThreadPoolExecutor(depth, "colibri-read")
        policy = DirectPolicy(io)
        self._idle = [ReadSlot(policy) for _ in range(depth)]
        self._running: dict[asyncio.Task[None], ReadRequest] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="colibri-reader", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> ReaderStats:
        """A snapshot of the counts."""
        return self._meter.snapshot()

    @property
    def staging_nbytes(self) -> int:
        """The most memory that the slots' staging buffers can take together."""
        if not isinstance(self._store, PlannedStore):
            return 0
        keys = self._store.keys()
        return self.depth * max((round_up(self._store.plan(key).staging_nbytes) for key in keys), default=0)

    def submit(self, key: ExpertKey, buffer: memoryview, demand: bool) -> Future[int]:
        """Read the block into buffer[:nbytes(key)]; the value is the number of bytes read from the medium.

        `buffer` is as for ExpertStore.read_into and belongs to the reader until the future is done. Every error,
        also an unknown key or a wrong buffer, is a StoreError that comes through the future.
        """
        request = ReadRequest(key, buffer)
        problem = self._problem(key, buffer)
        if problem is None and not self._queue.put(request, demand):
            problem = "the reader is closed"
        if problem is not None:
            request.future.set_exception(StoreError(f"{key_name(key)}: {problem}"))
            return request.future
        with suppress(RuntimeError):  # closed since: then close() has failed the future
            self._loop.call_soon_threadsafe(self._start_reads)
        return request.future

    def _problem(self, key: ExpertKey, buffer: memoryview) -> str | None:
        try:
            nbytes = self._store.nbytes(key)
        except KeyError:
            return "the store has no such block: was it converted from another model?"
        except ColibriError as error:
            return str(error)
        if buffer.readonly or buffer.format != "B" or len(buffer) % ALIGNMENT or len(buffer) < nbytes:
            return f"{nbytes} bytes need a writable buffer of format B, a multiple of 4096 long, not of {len(buffer)}"
        if address_of(buffer) % ALIGNMENT:
            return "the buffer's address is not a multiple of 4096: take it from an Arena"
        return None

    def promote(self, future: Future[int]) -> bool:
        """Make a waiting prefetch a demand read. False when it does not wait any more."""
        return self._queue.promote(future)

    def cancel(self, future: Future[int]) -> bool:
        """Drop a read that has not started: the buffer is the caller's again. False when it runs or is done."""
        return self._queue.drop(future) and future.cancel()

    # --- on the reader's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _start_reads(self) -> None:
        while self._idle and (request := self._queue.take()) is not None:
            if request.future.set_running_or_notify_cancel():
                task = self._loop.create_task(self._serve(self._idle.pop(), request))
                self._running[task] = request
                task.add_done_callback(self._running.pop)

    async def _serve(self, slot: ReadSlot, request: ReadRequest) -> None:
        try:
            with self._meter.in_flight():
                nbytes = await self._read_twice(slot, request)
        except Exception as error:
            outcome: int | StoreError = _as_store_error(request.key, error)
        else:
            outcome = nbytes
        # Not reached when close() gave up on this read: its thread may still use the slot's handles.
        self._idle.append(slot)
        self._start_reads()
        self._meter.ended(outcome if isinstance(outcome, int) else None)
        _settle(request.future, outcome)

    async def _read_twice(self, slot: ReadSlot, request: ReadRequest) -> int:
        try:
            return await self._read(slot, request)
        except (OSError, StoreError) as error:
            if not is_eio(error):
                raise
            self._meter.retried()
        return await self._read(slot, request)

    async def _read(self, slot: ReadSlot, request: ReadRequest) -> int:
        return await _read_block(slot, self._store, request.key, request.buffer, executor=self._executor)

    # --- ending ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Fail what waits, let reads in flight end, then fail those that do not within the timeout. Idempotent."""
        waiting = self._queue.close()
        if waiting is not None:
            for request in waiting:
                _settle(request.future, _closed(request.key))
            asyncio.run_coroutine_threadsafe(self._drain(), self._loop)
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * self._close_timeout_sec + 1)

    async def _drain(self) -> None:
        try:
            if self._running:
                await asyncio.wait(set(self._running), timeout=self._close_timeout_sec)
            stuck = dict(self._running)
            for task, request in stuck.items():
                task.cancel()
                _settle(request.future, _closed(request.key))
            await asyncio.gather(*stuck, return_exceptions=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._close_timeout_sec):
                    for slot in self._idle:
                        await _close_slot(slot, executor=self._executor)
        finally:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@wrap
def _read_block(slot: ReadSlot, store: ExpertStore, key: ExpertKey, buffer: memoryview) -> int:
    """Read and finish a block, in a thread of the executor; the bytes that came from the medium."""
    if not isinstance(store, PlannedStore):
        return store.read_into(key, buffer)
    plan = store.plan(key)
    store.finish(key, slot.read(key_name(key), plan, buffer), buffer)
    return plan.nbytes


@wrap
def _close_slot(slot: ReadSlot) -> None:
    slot.close()


def _settle(future: Future[int], outcome: int | StoreError) -> None:
    with suppress(InvalidStateError):  # cancelled by its owner, or failed by close() before the read came back
        if isinstance(outcome, int):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)


def _closed(key: ExpertKey) -> StoreError:
    return StoreError(f"{key_name(key)}: the reader was closed before the block was read")


def _as_store_error(key: ExpertKey, error: Exception) -> StoreError:
    """`error` itself when it is a StoreError, else one that names the key and keeps the cause."""
    if isinstance(error, StoreError):
        return error
    named = StoreError(f"{key_name(key)}: cannot be read: {type(error).__name__}: {error}: check the model's files")
    named.__cause__ = error
    return named
