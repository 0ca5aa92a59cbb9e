"""Counts the operations inside a resource so that it is resized or closed only when nobody is inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

from colibri_offload.errors import StoreError

PATIENCE_SEC = 10.0  # a read that takes longer is stuck in the kernel


class Gate:
    """Many may be inside at once, or one alone, or nobody ever again."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._changed = Condition()
        self._inside = 0
        self._barred = False
        self._shut = False

    @contextmanager
    def use(self) -> Iterator[None]:
        """Be inside. StoreError when the resource is closed."""
        with self._changed:
            self._wait_for_entry()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be inside alone: waits for the others to leave and keeps new ones out."""
        with self._changed:
            self._wait_for_entry()
            self._barred = True
            idle = self._changed.wait_for(lambda: self._inside == 0, PATIENCE_SEC)
            if not idle:
                self._barred = False
                self._changed.notify_all()
                raise StoreError(f"{self._what}: a read has not ended for {PATIENCE_SEC:g} s: check the disk")
        try:
            yield
        finally:
            with self._changed:
                self._barred = False
                self._changed.notify_all()

    def shut(self) -> bool:
        """Let nobody in any more. True for the one caller who may now free the resource.

        False when it was shut before, or when somebody inside is stuck: then it must stay allocated.
        """
        with self._changed:
            if self._shut:
                return False
            self._shut = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._inside == 0 and not self._barred, PATIENCE_SEC)

    def _wait_for_entry(self) -> None:
        if not self._changed.wait_for(lambda: self._shut or not self._barred, 2 * PATIENCE_SEC):
            raise StoreError(f"{self._what}: busy for {2 * PATIENCE_SEC:g} s: check the disk")
        if self._shut:
            raise StoreError(f"{self._what}: the store is closed: open it again")
