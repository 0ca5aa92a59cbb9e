"""The compiler and its object cache: hits, misses, damage, directories that cannot be written, several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import llvmlite.ir as ir
import numpy as np
import pytest
from jit_util import TASK

from colibri_offload.errors import JitError, UnsupportedError
from colibri_offload.jit import compiler as compiler_module
from colibri_offload.jit.compiler import Compiler, default_cache_dir
from colibri_offload.jit.emit import Fn, Struct, i64, ptr
from colibri_offload.jit.kernels import Kernels
from colibri_offload.jit.targets import Target, get_target

Cell = Struct("Cell", value=i64)


def builder(target: Target, constant: int) -> Callable[[ir.Module], None]:
    """A module whose function `write` puts `constant` + task into a cell."""

    def build(module: ir.Module) -> None:
        with Fn(module, target, "write", {"args": ptr, "task": i64}) as k:
            k.args.store(k.task + constant)

    return build


def written(compiler: Compiler, constant: int, name: str = "write") -> int:
    """What the kernel called `name` writes, compiled or from the cache."""
    (address,) = compiler.link(name, builder(compiler.target, constant), "write")
    cell = Cell.new()
    TASK(address)(cell.ctypes.data, 5)
    return int(cell["value"][0]) - 5


def objects(directory: Path) -> list[Path]:
    return sorted((directory / "objects").iterdir())


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    first, second = (Compiler(get_target(), tmp_path) for _ in range(2))
    assert written(first, 7) == written(second, 7) == 7
    assert (first.compiled, first.cached, second.compiled, second.cached) == (1, 0, 0, 1)
    assert len(objects(tmp_path)) == 1


def test_the_key_tells_everything_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another name, target, source or llvmlite must never find the object."""
    one = Compiler(get_target(), tmp_path)
    keys = {one.key("write"), one.key("other"), Compiler(Target(), tmp_path).key("write")}
    keys.add(Compiler(Target(features="+sse3"), tmp_path).key("write"))
    keys.add(Compiler(Target(cpu="nehalem"), tmp_path).key("write"))
    monkeypatch.setattr(compiler_module.llvmlite, "__version__", "0.0.1")
    keys.add(one.key("write"))
    monkeypatch.setattr(compiler_module, "source_digest", lambda: "other source")
    keys.add(one.key("write"))
    assert len(keys) == 7
    written(one, 1)
    other = Compiler(get_target(), tmp_path)
    monkeypatch.setattr(compiler_module, "source_digest", lambda: "newer source")
    assert written(other, 2) == 2 and other.compiled == 1


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half a digest": lambda data: data[:16],
    "digest only": lambda data: data[:32],
    "one byte short": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "zero tail": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "one bit of the code": lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
    "one bit of the digest": lambda data: bytes([data[0] ^ 128]) + data[1:],
    "bytes behind": lambda data: data + b"\0",
    "an object without digest": lambda data: data[32:],
    "text": lambda data: b"<html>quota exceeded</html>" * 50,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_objects_are_compiled_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    written(Compiler(get_target(), tmp_path), 3)
    (path,) = objects(tmp_path)
    good = path.read_bytes()
    path.write_bytes(damage(good))
    again = Compiler(get_target(), tmp_path)
    assert written(again, 3) == 3
    assert (again.compiled, again.cached) == (1, 0)
    assert path.read_bytes() == good


def test_an_object_under_another_name_is_not_taken(tmp_path: Path) -> None:
    """Files that were swapped or restored wrongly are intact, but not what was asked for."""
    compiler = Compiler(get_target(), tmp_path)
    written(compiler, 1, "one")
    written(compiler, 2, "two")
    a, b = objects(tmp_path)
    data = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(data)
    again = Compiler(get_target(), tmp_path)
    assert written(again, 1, "one") == 1 and written(again, 2, "two") == 2
    assert again.compiled == 2


def unwritable(tmp_path: Path, kind: str) -> Path:
    if kind == "below a file":
        (tmp_path / "file").write_text("")
        return tmp_path / "file" / "cache"
    if kind == "objects is a file":
        (tmp_path / "objects").write_text("")
        return tmp_path
    if kind == "name too long":
        return tmp_path / ("x" * 300)
    (tmp_path / "objects").mkdir(parents=True)
    (tmp_path / "objects").chmod(0o500)
    return tmp_path


@pytest.mark.parametrize("kind", ["below a file", "objects is a file", "name too long", "read-only"])
def test_a_cache_that_cannot_be_written_is_no_cache(tmp_path: Path, kind: str) -> None:
    if kind == "read-only" and os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    directory = unwritable(tmp_path, kind)
    for _ in range(2):
        compiler = Compiler(get_target(), directory)
        assert written(compiler, 4) == 4 and compiler.compiled == 1


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(compiler_module.os, "replace", full)
        assert written(Compiler(get_target(), tmp_path), 5) == 5
    assert objects(tmp_path) == []


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "a"))
    assert default_cache_dir() == tmp_path / "a"
    written(Compiler(get_target()), 6)
    assert len(objects(tmp_path / "a")) == 1
    monkeypatch.delenv("COLIBRI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert default_cache_dir() == tmp_path / "b" / "colibri-offload"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert default_cache_dir() == tmp_path / "c" / ".cache" / "colibri-offload"


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("COLIBRI_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(compiler_module.Path, "home", no_home)
    compiler = Compiler(get_target())
    assert written(compiler, 8) == 8 and compiler.compiled == 1


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_jit_compiler import Compiler, get_target, written
for repeat in range(3):
    compiler = Compiler(get_target(), Path(sys.argv[1]))
    for constant in range(20):
        assert written(compiler, constant, f"kernel {constant}") == constant
"""


def test_processes_may_share_a_cache(tmp_path: Path) -> None:
    """Three processes compile the same twenty kernels at once: each is right, and the cache is whole afterwards."""
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent)]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for writer in writers:
        _, message = writer.communicate(timeout=60)
        assert writer.returncode == 0, message
    assert len(objects(tmp_path)) == 20 and {p.suffix for p in objects(tmp_path)} == {".o"}
    reader = Compiler(get_target(), tmp_path)
    assert [written(reader, c, f"kernel {c}") for c in range(20)] == list(range(20))
    assert reader.compiled == 0


def test_threads_may_compile_at_once(tmp_path: Path) -> None:
    def work(constant: int) -> int:
        return written(Compiler(get_target(), tmp_path), constant, f"kernel {constant % 4}")

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, [0, 1, 2, 3] * 5)) == [0, 1, 2, 3] * 5


def test_threads_may_ask_for_the_same_kernel(tmp_path: Path) -> None:
    """Readers pack experts on several threads; two that met a format first both linked it, and the second failed."""
    k = Kernels(Compiler(get_target(), tmp_path))
    before, barrier = k.compiler.compiled, Barrier(4)

    def ask(_: int) -> int:
        barrier.wait()
        return k.combine()

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(ask, range(4)))) == 1
    assert k.compiler.compiled == before + 1


def test_several_symbols_of_a_module(tmp_path: Path) -> None:
    compiler = Compiler(get_target(), tmp_path)

    def build(module: ir.Module) -> None:
        for i, name in enumerate(("a", "b")):
            with Fn(module, compiler.target, name, {"args": ptr, "task": i64}) as k:
                k.args.store(k.task * 0 + i)

    cells = np.full(2, 9, np.int64)
    for i, address in enumerate(compiler.link("pair", build, "a", "b")):
        TASK(address)(cells[i:].ctypes.data, 0)
    assert cells.tolist() == [0, 1]


def test_broken_modules_are_named_in_one_line(tmp_path: Path) -> None:
    def build(module: ir.Module) -> None:
        ir.Function(module, ir.FunctionType(ir.VoidType(), []), "f").append_basic_block("without a terminator")

    with pytest.raises(JitError, match="kernel module broken: ") as caught:
        Compiler(get_target(), tmp_path).link("broken", build, "f")
    assert "\n" not in str(caught.value)


def test_targets_that_cannot_run_here_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"target 'cray' cannot run on this CPU; choose one of .*generic"):
        get_target("cray")
    monkeypatch.setenv("COLIBRI_TARGET", "generic")
    assert get_target().name == "generic"
    monkeypatch.setenv("COLIBRI_TARGET", "cray")
    with pytest.raises(UnsupportedError, match="cray"):
        get_target()
