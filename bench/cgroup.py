"""A memory cgroup for a child process, version 1 or 2.

Sources: Linux Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Cgroup:
    """A group with a limit. `anonymous` and `kills`: the keys that count anonymous bytes and OOM kills, and where."""

    path: Path
    anonymous: tuple[str, str]
    kills: tuple[str, str]

    @property
    def procs(self) -> Path:
        return self.path / "cgroup.procs"

    @property
    def peak(self) -> int:
        """Most bytes charged to the group at any time, page cache included; 0 where the kernel does not say."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if (self.path / name).exists():
                return int((self.path / name).read_text())
        return 0

    def anonymous_bytes(self) -> int:
        return self._read(*self.anonymous)

    def oom_kills(self) -> int:
        return self._read(*self.kills)

    def _read(self, file: str, key: str) -> int:
        lines = (self.path / file).read_text().splitlines()
        return int(dict(line.split(" ", 1) for line in lines)[key])


@contextmanager
def memory_cgroup(limit_bytes: int, name: str = "colibri") -> Iterator[Cgroup]:
    """A group limited to `limit_bytes`, removed afterwards. OSError where the machine does not let us make one."""
    group = _make(f"{name}-{os.getpid()}", limit_bytes)
    try:
        yield group
    finally:
        _remove(group.path)


def _make(name: str, limit_bytes: int) -> Cgroup:
    if (ROOT / "memory/memory.limit_in_bytes").exists():
        path = ROOT / "memory" / name
        path.mkdir()
        limit = path / "memory.limit_in_bytes"
        group = Cgroup(path, ("memory.stat", "total_rss"), ("memory.oom_control", "oom_kill"))
    else:
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        parent = ROOT / own.removeprefix("0::").lstrip("/")
        if "memory" not in (parent / "cgroup.subtree_control").read_text().split():
            (parent / "cgroup.subtree_control").write_text("+memory")
        path = parent / name
        path.mkdir()
        limit = path / "memory.max"
        group = Cgroup(path, ("memory.stat", "anon"), ("memory.events", "oom_kill"))
    try:
        limit.write_text(str(limit_bytes))
    except OSError:
        path.rmdir()
        raise
    return group


def _remove(path: Path) -> None:
    for _ in range(50):  # the kernel may still be taking the last process apart
        try:
            path.rmdir()
            return
        except OSError:
            time.sleep(0.1)
