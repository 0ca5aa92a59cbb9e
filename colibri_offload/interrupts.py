"""Ctrl-C at a moment of our choosing: KeyboardInterrupt may come between any two instructions, also where the expert
cache has taken a slot but not yet asked for its block."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def postponed_interrupts() -> Iterator[Callable[[], None]]:
    """A Ctrl-C inside the block takes effect when the yielded function is called, or at the block's end.

    A second one takes effect at once, for a block that does not end. Does nothing outside the main thread, the only
    one that signals interrupt, and where SIGINT has no Python handler.
    """
    handler: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    caught: list[tuple[int, FrameType | None]] = []

    def keep(number: int, frame: FrameType | None) -> None:
        caught.append((number, frame))
        if len(caught) > 1:
            deliver()

    def deliver() -> None:
        if caught:
            first = caught[0]
            caught.clear()
            handler(*first)

    signal.signal(signal.SIGINT, keep)
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, handler)
        deliver()
