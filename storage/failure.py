"""OSError becomes StoreError here, once, with the remedy that fits its errno."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from colibri_offload.errors import StoreError

_FULL = "free disk space (or raise the quota or file size limit), then run the same command with --resume"
_REMEDIES = {
    errno.ENOENT: "check the path; a shard or file of the store is missing",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "choose an output directory on a writable filesystem",
    errno.EIO: "the medium failed twice: check the disk (dmesg, smartctl) and copy the file elsewhere",
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: _FULL,
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close other programs: the system's table of open files is full",
    errno.ENOMEM: "lower --memory-budget or raise the address space limit (ulimit -v)",
}


def store_error(what: str, error: OSError) -> StoreError:
    """A StoreError for `error` while doing `what` (names the file, and the key where there is one)."""
    number = error.errno or 0
    reason = os.strerror(number) if number else str(error) or type(error).__name__
    return StoreError(f"{what}: {reason}: {_REMEDIES.get(number, 'check the file and its disk')}")


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise OSErrors of the block as StoreErrors about `what`, keeping the cause."""
    try:
        yield
    except OSError as error:
        raise store_error(what, error) from error


def is_eio(error: BaseException | None) -> bool:
    """Whether `error`, or what caused it, is an I/O error of the medium, which a second try may cure."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EIO:
            return True
        error = error.__cause__
    return False
