"""Whether a file can be read past the page cache (O_DIRECT): probed once per file, remembered, said once."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from threading import Lock
from typing import Literal

from colibri_offload.storage.arena import ALIGNMENT, anonymous

Io = Literal["auto", "direct", "buffered"]
O_DIRECT = getattr(os, "O_DIRECT", 0)
# What filesystems without direct I/O, or with another alignment, answer at open or at the first read.
REFUSALS = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EFAULT, errno.ENOSYS})
_log = logging.getLogger(__name__)


class DirectPolicy:
    """Answers for each file whether to read it directly. Safe for several threads.

    io: "buffered" never, "direct" and "auto" wherever the filesystem takes it. A refusal is logged for the first
    file only, as a warning when direct I/O was asked for.
    """

    def __init__(self, io: Io) -> None:
        self._level = logging.WARNING if io == "direct" else logging.INFO
        self._wanted = io != "buffered"
        self._lock = Lock()
        self._answers: dict[Path, bool] = {}
        self._said = False

    def known(self, path: Path) -> bool | None:
        """The answer without I/O; None when the file must be probed first."""
        return self._answers.get(path) if self._wanted else False

    def probe(self, path: Path) -> bool:
        """The answer, by reading a block of the file the first time. OSError when the file cannot be read at all."""
        with self._lock:
            if path not in self._answers:
                try:
                    _read_first_block(path)
                    self._answers[path] = True
                except OSError as error:
                    if error.errno not in REFUSALS:
                        raise
                    self._set_refused(path, error)
            return self._answers[path]

    def refuse(self, path: Path, error: OSError) -> None:
        """Read this file buffered from now on: it refused a direct read with `error` after the probe."""
        with self._lock:
            self._set_refused(path, error)

    def _set_refused(self, path: Path, error: OSError) -> None:
        self._answers[path] = False
        if not self._said:
            self._said = True
            _log.log(self._level, "%s: no direct I/O here (%s): reading through the page cache", path, error.strerror)


def _read_first_block(path: Path) -> None:
    if not O_DIRECT:
        raise OSError(errno.ENOTSUP, "this platform has no O_DIRECT")
    fd = os.open(path, os.O_RDONLY | O_DIRECT)
    try:
        os.preadv(fd, [anonymous(ALIGNMENT)], 0)
    finally:
        os.close(fd)
