"""Available memory in made-up /proc and cgroup trees, the measured peak, and sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_offload.errors import UsageError
from colibri_offload.scheduler.memory import available_memory, format_size, parse_size, peak_memory_bytes

GIB = 1024**3
MACHINE = 64 * GIB
V1_NO_LIMIT = 9223372036854771712


class Tree:
    """A root directory with /proc files and cgroup mounts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {2 * MACHINE // 1024} kB\nMemAvailable:   {MACHINE // 1024} kB\n")

    def write(self, path: str, text: object) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}")

    def process(self, cgroup: str, *mounts: str) -> None:
        self.write("proc/self/cgroup", cgroup)
        self.write("proc/self/mountinfo", "22 1 0:21 / /proc rw - proc proc rw\n" + "\n".join(mounts) + "\n")

    def v2(self, path: str, limit: object, usage: int, file: int = 0, high: object = "max") -> None:
        self.write(f"{path}/memory.max", f"{limit}\n")
        self.write(f"{path}/memory.high", f"{high}\n")
        self.write(f"{path}/memory.current", f"{usage}\n")
        self.write(f"{path}/memory.stat", f"anon {usage - file}\nfile {file}\ninactive_file {file}\nactive_file 0\n")

    def v1(self, path: str, limit: int, usage: int, file: int = 0, hierarchy: int = 1) -> None:
        self.write(f"{path}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{path}/memory.usage_in_bytes", f"{usage}\n")
        self.write(f"{path}/memory.use_hierarchy", f"{hierarchy}\n")
        own = "cache 1\ninactive_file 1\nactive_file 1\n"  # the group without its children: not what counts
        total = f"total_inactive_file {file // 2}\ntotal_active_file {file - file // 2}\n"
        self.write(f"{path}/memory.stat", own + total)


V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_without_cgroups_it_is_what_the_machine_has(tree):
    assert available_memory(tree.root) == MACHINE


def test_v2_limit_less_what_is_used(tree):
    tree.process("0::/user/app\n", V2_MOUNT)
    tree.v2("sys/fs/cgroup/user/app", 8 * GIB, 3 * GIB)
    assert available_memory(tree.root) == 5 * GIB


def test_v2_page_cache_counts_as_free(tree):
    tree.process("0::/app\n", V2_MOUNT)
    tree.v2("sys/fs/cgroup/app", 8 * GIB, 8 * GIB, file=6 * GIB)
    assert available_memory(tree.root) == 6 * GIB


def test_v2_without_a_limit_is_not_limited(tree):
    tree.process("0::/app\n", V2_MOUNT)
    tree.v2("sys/fs/cgroup/app", "max", 3 * GIB)
    assert available_memory(tree.root) == MACHINE


def test_v2_high_throttles_before_max_kills(tree):
    tree.process("0::/app\n", V2_MOUNT)
    tree.v2("sys/fs/cgroup/app", 8 * GIB, GIB, high=4 * GIB)
    assert available_memory(tree.root) == 3 * GIB


@pytest.mark.parametrize(("parent", "expected"), [(6 * GIB, 2 * GIB), ("max", 7 * GIB)])
def test_v2_a_parents_limit_holds_for_all_its_children(tree, parent, expected):
    tree.process("0::/slice/app\n", V2_MOUNT)
    tree.v2("sys/fs/cgroup/slice", parent, 4 * GIB)
    tree.v2("sys/fs/cgroup/slice/app", 8 * GIB, GIB)
    assert available_memory(tree.root) == expected


def test_usage_beyond_the_limit_leaves_nothing(tree):
    tree.process("0::/app\n", V2_MOUNT)
    tree.v2("sys/fs/cgroup/app", 2 * GIB, 3 * GIB)
    assert available_memory(tree.root) == 0


def test_the_machine_may_have_less_than_the_limit(tree):
    tree.process("0::/app\n", V2_MOUNT)
    tree.v2("sys/fs/cgroup/app", 128 * GIB, GIB)
    assert available_memory(tree.root) == MACHINE


def test_v1_limit_with_page_cache_of_the_children(tree):
    tree.process("9:name=systemd:/\n4:cpu,memory:/app\n0::/\n", V1_MOUNT)
    tree.v1("sys/fs/cgroup/memory", V1_NO_LIMIT, 20 * GIB)
    tree.v1("sys/fs/cgroup/memory/app", 4 * GIB, 4 * GIB, file=3 * GIB)
    assert available_memory(tree.root) == 3 * GIB


@pytest.mark.parametrize(("hierarchy", "expected"), [(1, GIB), (0, 7 * GIB)])
def test_v1_a_parent_binds_only_with_use_hierarchy(tree, hierarchy, expected):
    tree.process("4:memory:/slice/app\n", V1_MOUNT)
    tree.v1("sys/fs/cgroup/memory/slice", 2 * GIB, GIB, hierarchy=hierarchy)
    tree.v1("sys/fs/cgroup/memory/slice/app", 8 * GIB, GIB, hierarchy=0)
    assert available_memory(tree.root) == expected


def test_v1_beside_v2_without_a_memory_controller(tree):
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    tree.process("4:memory:/app\n0::/app\n", V1_MOUNT, unified)
    tree.v1("sys/fs/cgroup/memory/app", 4 * GIB, GIB)
    tree.write("sys/fs/cgroup/unified/app/cgroup.procs", "1")
    assert available_memory(tree.root) == 3 * GIB


@pytest.mark.parametrize(
    ("path", "mount_root"),
    [
        ("/docker/1234", "/docker/1234"),  # a container that sees the host's names
        ("/", "/"),  # a cgroup namespace
        ("/../other", "/"),  # a process that was moved out of the namespace
        ("/elsewhere", "/docker/1234"),
    ],
)
def test_a_container_sees_its_own_group_at_the_mount_point(tree, path, mount_root):
    tree.process(f"0::{path}\n", f"30 23 0:26 {mount_root} /sys/fs/cgroup ro - cgroup2 cgroup rw")
    tree.v2("sys/fs/cgroup", 4 * GIB, GIB)
    assert available_memory(tree.root) == 3 * GIB


def test_blanks_in_mount_points_and_colons_in_group_names(tree):
    tree.process("0::/a:b\n", r"30 23 0:26 / /mnt/my\040groups rw - cgroup2 cgroup2 rw")
    tree.v2("mnt/my groups/a:b", 4 * GIB, GIB)
    assert available_memory(tree.root) == 3 * GIB


def test_this_machine_has_memory():
    assert 0 < available_memory() < 2**50


def test_peak_is_read_from_proc(tree):
    tree.write("proc/self/status", "Name:\tpython\nVmPeak:\t  999 kB\nVmHWM:\t    1234 kB\nVmRSS:\t 10 kB\n")
    assert peak_memory_bytes(tree.root) == 1234 * 1024


def test_peak_without_proc_is_close_to_the_peak(tree):
    assert peak_memory_bytes(tree.root) == pytest.approx(peak_memory_bytes(), rel=0.5)


def test_peak_remembers_memory_that_was_given_back():
    """In a process of its own, as the peak of this one may be high already."""
    code = (
        "from colibri_offload.scheduler.memory import peak_memory_bytes as peak\n"
        "before = peak(); block = bytearray(b'x') * (48 << 20); del block; print(peak() - before)"
    )
    grown = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    assert 40 << 20 < grown < 128 << 20


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GiB", 4 * GIB), ("4gib", 4 * GIB), ("8GB", 8 * 10**9), ("512M", 512 * 1024**2), ("1.5GiB", 3 * GIB // 2),
        (" 2 K ", 2048), ("7kb", 7000), ("1T", 1024**4), ("2TB", 2 * 10**12), ("123", 123), ("12B", 12), ("0", 0),
        (".5K", 512), ("1.", 1), ("0.1K", 102), (77, 77), ("9007199254740993", 2**53 + 1),
    ],
)  # fmt: skip
def test_parse_size(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "4 Gigs", "-1", "1e9", "4GiBx", "0x10", "nan", "1,5G", "٣GiB", -5, 1.5, None, True, "9999999T", 2**63],
)
def test_parse_size_refuses(text):
    with pytest.raises(UsageError, match=r"--memory-budget: .*(4GiB|TiB)") as caught:
        parse_size(text, "--memory-budget")
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536 * 1024**2, "1.50 GiB"), (1024**2 - 1, "1.00 MiB"),
        (-2048, "-2.00 KiB"), (5000 * 1024**4, "5000.00 TiB"),
    ],
)  # fmt: skip
def test_format_size(nbytes, text):
    assert format_size(nbytes) == text


@given(st.integers(0, 2**50))
def test_formatted_sizes_can_be_parsed(nbytes):
    assert parse_size(format_size(nbytes)) == pytest.approx(nbytes, rel=0.01, abs=6)
