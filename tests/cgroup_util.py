"""A memory cgroup for one child process; pytest.skip where the machine does not let us make one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from engine_util import load_bench

cgroup = load_bench("cgroup")


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Any]:
    """A group (bench/cgroup.py) limited to `limit_bytes`, removed afterwards."""
    made = cgroup.memory_cgroup(limit_bytes)
    try:
        group = made.__enter__()
    except OSError as error:
        pytest.skip(f"no writable memory cgroup: {error}")
    try:
        yield group
    finally:
        made.__exit__(None, None, None)
