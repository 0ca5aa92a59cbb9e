"""Reads that wait for a slot: demand first, then prefetch, each in order of arrival."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock

from colibri_offload.storage.base import ExpertKey


@dataclass(frozen=True, eq=False)
class ReadRequest:
    """Read `key` into `buffer`; the future's value is the number of bytes read from the medium."""

    key: ExpertKey
    buffer: memoryview
    future: Future[int] = field(default_factory=Future)


class ReadQueue:
    """Safe for several threads. A closed queue takes nothing more."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._demand: OrderedDict[Future[int], ReadRequest] = OrderedDict()
        self._prefetch: OrderedDict[Future[int], ReadRequest] = OrderedDict()
        self._closed = False

    def put(self, request: ReadRequest, demand: bool) -> bool:
        """Append the request. False when the queue is closed."""
        with self._lock:
            if not self._closed:
                (self._demand if demand else self._prefetch)[request.future] = request
            return not self._closed

    def promote(self, future: Future[int]) -> bool:
        """Make a waiting prefetch a demand. False when it does not wait."""
        with self._lock:
            request = self._prefetch.pop(future, None)
            if request is not None:
                self._demand[future] = request
            return request is not None

    def drop(self, future: Future[int]) -> bool:
        """Forget a waiting request. False when it does not wait."""
        with self._lock:
            return bool(self._prefetch.pop(future, None) or self._demand.pop(future, None))

    def take(self) -> ReadRequest | None:
        """The next request, or None."""
        with self._lock:
            for waiting in (self._demand, self._prefetch):
                if waiting:
                    return waiting.popitem(last=False)[1]
            return None

    def close(self) -> list[ReadRequest] | None:
        """Close the queue and return what still waited; None when it was closed before."""
        with self._lock:
            if self._closed:
                return None
            self._closed = True
            rest = [*self._demand.values(), *self._prefetch.values()]
            self._demand.clear()
            self._prefetch.clear()
            return rest
