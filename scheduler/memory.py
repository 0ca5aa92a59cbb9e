"""How many bytes this process may still take, how many it took at most, and sizes as people write them."""

from __future__ import annotations

import re
import sys
from decimal import Decimal
from pathlib import Path

import psutil

from colibri_offload.errors import UsageError
from colibri_offload.scheduler.cgroup import memory_cgroups

# K, M, G and T alone are binary, as in docker and systemd; KB, MB, GB and TB are decimal, as on a disk's label.
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")
_LARGEST = 2**63 - 1


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still take before the machine or one of its memory cgroups runs out.

    Page cache that the kernel can reclaim counts as free; swap does not count. `root` is where /proc and the cgroup
    mounts are looked up. Without /proc (macOS, Windows) it is what the operating system calls available.
    """
    machine = _kilobytes(root / "proc/meminfo", "MemAvailable")
    free = psutil.virtual_memory().available if machine is None else machine
    return min([free, *(group.free_bytes for group in memory_cgroups(root))])


def peak_memory_bytes(root: Path = Path("/")) -> int:
    """The largest resident set of this process so far: VmHWM, as ru_maxrss may be that of the parent before exec."""
    peak = _kilobytes(root / "proc/self/status", "VmHWM")
    return _peak_without_proc() if peak is None else peak


def parse_size(value: str | int, flag: str = "size") -> int:
    """"4GiB", "8GB", "512M", "1.5 GiB", "1048576" or an int → bytes ≥ 0; a fraction of a byte is dropped.

    Raises: UsageError naming `flag` and the value.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[2].upper() not in _UNITS:
            raise UsageError(f"{flag}: {value!r} is not a size; write bytes or a size such as 4GiB, 8GB or 512M")
        nbytes = int(Decimal(match[1]) * _UNITS[match[2].upper()])
    if not 0 <= nbytes <= _LARGEST:
        raise UsageError(f"{flag}: {value!r} is out of range; give a size from 0 to 8388607TiB")
    return nbytes


def format_size(nbytes: int) -> str:
    """"1.50 GiB": two decimals in the largest binary unit; whole bytes below 1 KiB."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(value) < 1023.995 or unit == "TiB":
            break
    return f"{value:.2f} {unit}"


def _kilobytes(path: Path, field: str) -> int | None:
    """Bytes of the line "Field:   123 kB" of a /proc file; None where the file or the line does not exist."""
    try:
        text = path.read_text()
    except OSError:
        return None
    match = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _peak_without_proc() -> int:
    info = psutil.Process().memory_info()
    if hasattr(info, "peak_wset"):  # Windows
        return int(info.peak_wset)
    import resource  # does not exist on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
