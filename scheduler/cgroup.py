"""The memory cgroups that limit this process, version 1 and 2, from its own group up to the top of the mount.

Sources: Linux Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst; proc_pid_mountinfo(5).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class MemoryCgroup:
    """One limited group. `reclaimable_bytes`: the part of the usage that is page cache, which the kernel can drop."""

    limit_bytes: int
    usage_bytes: int
    reclaimable_bytes: int

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - max(0, self.usage_bytes - self.reclaimable_bytes))


@dataclass(frozen=True)
class _Layout:
    """File names of one cgroup version. The statistics must include the children: "total_" in v1, always so in v2."""

    limits: tuple[str, ...]
    usage: str
    stat_prefix: str


_V1 = _Layout(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")
_V2 = _Layout(("memory.max", "memory.high"), "memory.current", "")


def memory_cgroups(root: Path = Path("/")) -> list[MemoryCgroup]:
    """Every group with a limit that this process is charged to; empty where there are none. `root` as in memory.py."""
    groups = []
    for layout, mount, path in _mounts(root):
        # A group with use_hierarchy 0 (v1) is not charged for its children: its limit does not bind them.
        for depth, directory in enumerate(_ancestors(mount, path)):
            if depth and _number(directory / "memory.use_hierarchy") == 0:
                continue
            group = _read(directory, layout)
            if group is not None:
                groups.append(group)
    return groups


def _mounts(root: Path) -> Iterator[tuple[_Layout, Path, PurePosixPath]]:
    """Layout, mount point, and this process's group below it, for each hierarchy with a memory controller."""
    own = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            own[_V2 if controllers == "" else _V1] = PurePosixPath(path)
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if kind[0] == "cgroup2":
            layout = _V2
        elif kind[0] == "cgroup" and "memory" in kind[-1].split(","):
            layout = _V1
        else:
            continue
        if layout in own:
            mount_root, mount = PurePosixPath(_unescape(fields[3])), root / _unescape(fields[4]).lstrip("/")
            yield layout, mount, _below(own[layout], mount_root)


def _below(path: PurePosixPath, mount_root: PurePosixPath) -> PurePosixPath:
    """The group relative to the mounted subtree, or its top when the group lies outside, as in some containers."""
    if path.is_relative_to(mount_root) and ".." not in path.parts:
        return path.relative_to(mount_root)
    return PurePosixPath()


def _ancestors(mount: Path, path: PurePosixPath) -> list[Path]:
    return [mount / part for part in (path, *path.parents)] if path.parts else [mount]


def _read(directory: Path, layout: _Layout) -> MemoryCgroup | None:
    limits = [limit for name in layout.limits if (limit := _number(directory / name)) is not None]
    usage = _number(directory / layout.usage)
    if not limits or usage is None:
        return None
    stat = dict(line.split(" ", 1) for line in _lines(directory / "memory.stat"))
    reclaimable = sum(int(stat.get(f"{layout.stat_prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
    return MemoryCgroup(min(limits), usage, reclaimable)


def _number(path: Path) -> int | None:
    """The number in a control file; None for "max" and for a file that does not exist."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _unescape(field: str) -> str:
    """mountinfo writes blanks and backslashes as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
