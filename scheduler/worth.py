"""Whether prefetching pays: switched off when too much of what it reads is wasted, tried again from time to time."""

from __future__ import annotations

_FADE = 0.95  # of the byte counts, per account: about 20 accounts are remembered
_TRIAL = 16  # accounts with bytes before the first judgement
_LONGEST_PAUSE = 16  # times the first one


class PrefetchWorth:
    """A switch fed with the bytes of recent prefetches.

    min_useful: share of the bytes that must be used. pause: accounts until the next trial; doubles with each failed
    one.
    """

    def __init__(self, min_useful: float = 0.3, pause: int = 256) -> None:
        self._min_useful, self._first_pause = min_useful, pause
        self._pause, self._paused = pause, 0
        self._used = self._wasted = 0.0
        self._seen = 0

    @property
    def enabled(self) -> bool:
        return self._paused == 0

    def account(self, used: int, wasted: int) -> None:
        """Bytes of prefetches that turned out used and wasted since the last call. To be called at every step."""
        if not self.enabled:
            self._paused -= 1
            return
        if used + wasted == 0:
            return
        self._used = self._used * _FADE + used
        self._wasted = self._wasted * _FADE + wasted
        self._seen += 1
        if self._seen < _TRIAL:
            return
        if self._used < self._min_useful * (self._used + self._wasted):
            self._paused, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE * self._first_pause)
            self._used = self._wasted = 0.0
            self._seen = 0
        else:
            self._pause = self._first_pause
