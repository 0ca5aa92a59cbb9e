"""Text that grows token by token and is always safe to show."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from colibri_offload.errors import UsageError
from colibri_offload.text.tokenizer import Tokenizer


class TextStream:
    """Turns ids into pieces of text: whole characters only, and nothing of a stop string.

    The pieces, joined, equal `tokenizer.decode(ids)` of all ids, or its part before the first stop string. Of several
    stop strings the one completed first counts, of those completed by the same character the longest.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, skip_special: bool = True) -> None:
        """UsageError for an empty stop string, which every text contains."""
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise UsageError(f"stop {stop!r}: must be a list of strings that are not empty")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._started = False  # the first text, from which a leading space may have to go, has been seen
        self._held = ""  # decoded, but perhaps the start of a stop string
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that `token_id` makes safe to show, often "". After a stop string always ""."""
        if self.stopped or (self._skip_special and token_id in self._tokenizer.special_ids):
            return ""
        return self._show(self._utf8.decode(self._tokenizer.token_bytes(token_id)), final=False)

    def finish(self) -> str:
        """What is still held back: an unfinished character as U+FFFD, the start of a stop string as it is."""
        if self.stopped:
            return ""
        return self._show(self._utf8.decode(b"", final=True), final=True)

    def _show(self, new: str, *, final: bool) -> str:
        if new and not self._started:
            new = self._tokenizer.strip(new)
            self._started = True
        self._held += new
        cut = self._find_stop()
        if cut is not None:
            self.stopped = True
        else:
            cut = len(self._held) - (0 if final else self._partial_stop())
        shown, self._held = self._held[:cut], "" if self.stopped else self._held[cut:]
        self.text += shown
        return shown

    def _find_stop(self) -> int | None:
        """Where the stop string that is completed first begins."""
        found = [(start + len(s), start) for s in self._stop if (start := self._held.find(s)) >= 0]
        return min(found)[1] if found else None

    def _partial_stop(self) -> int:
        """Length of the longest end of the held text with which some stop string begins."""
        longest = min(len(self._held), max(map(len, self._stop), default=1) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stop)), 0)
