"""Advice to the kernel about memory maps that a library owns, by address; does nothing where madvise is missing."""

from __future__ import annotations

import ctypes
import mmap

from colibri_offload.storage.arena import round_up

_PAGE = mmap.PAGESIZE
_WILLNEED = getattr(mmap, "MADV_WILLNEED", None)
_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)
_madvise = None if _WILLNEED is None else ctypes.CDLL(None).madvise  # called with the GIL released
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def read_ahead(address: int, nbytes: int) -> None:
    """Start reading the range in large requests: page faults alone would fetch it in small pieces."""
    _advise(address, nbytes, _WILLNEED)


def unmap_pages(address: int, nbytes: int) -> None:
    """Take the pages of a read-only file map out of the process, so that they do not count as its memory.

    They stay in the page cache. Pages that the range covers in part stay mapped at its ends.
    """
    start = round_up(address, _PAGE)
    _advise(start, (address + nbytes) // _PAGE * _PAGE - start, _DONTNEED)


def _advise(address: int, nbytes: int, advice: int | None) -> None:
    if _madvise is not None and nbytes > 0:
        start = address // _PAGE * _PAGE
        _madvise(start, address + nbytes - start, advice)  # advice only: a refusal changes nothing but speed
