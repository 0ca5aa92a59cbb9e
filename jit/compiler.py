"""One place that parses, verifies, optimises, compiles and links; and the on-disk cache of compiled objects."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import llvmlite.ir as ir

from colibri_offload.errors import JitError
from colibri_offload.jit.targets import Target

DIGEST_NBYTES = 32


@cache
def source_digest() -> str:
    """Hash of this package's source files: generated code can change only when one of them does."""
    h = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        h.update(path.name.encode() + path.read_bytes())
    return h.hexdigest()[:16]


def default_cache_dir() -> Path:
    """COLIBRI_CACHE, else $XDG_CACHE_HOME/colibri-offload, else ~/.cache/colibri-offload.

    For a user without a home it is a directory that cannot be made: nothing is cached.
    """
    root = os.environ.get("COLIBRI_CACHE")
    if root:
        return Path(root)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "colibri-offload"
    except RuntimeError:
        return Path(os.devnull)


class ObjectCache:
    """Compiled objects by key, each behind a digest of key and object.

    A file that a crash, a full disk or anything else has damaged is ignored and written anew, never run.
    A cache that cannot be written (read-only home) is silently no cache.
    """

    def __init__(self, directory: Path):
        self.directory = directory / "objects"

    def get(self, key: str) -> bytes | None:
        try:
            data = (self.directory / f"{key}.o").read_bytes()
        except OSError:
            return None
        digest, found = data[:DIGEST_NBYTES], data[DIGEST_NBYTES:]
        return found if digest == _digest(key, found) else None

    def put(self, key: str, data: bytes) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            fd, name = tempfile.mkstemp(dir=self.directory)
        except OSError:
            return
        try:  # no fsync: what a power cut leaves of the file fails its digest
            with os.fdopen(fd, "wb") as f:
                f.write(_digest(key, data) + data)
            os.replace(name, self.directory / f"{key}.o")
        except OSError:
            with suppress(OSError):
                os.unlink(name)


def _digest(key: str, data: bytes) -> bytes:
    return hashlib.sha256(key.encode() + data).digest()


class Compiler:
    """Turns modules into callable addresses for one target. `compiled` and `cached` count objects made and found."""

    def __init__(self, target: Target, cache_dir: Path | None = None):
        self.target = target
        self.cache = ObjectCache(cache_dir or default_cache_dir())
        self.compiled = self.cached = 0
        self._machine = target.machine()
        self._jit: llvm.LLJIT | None = None
        self._libraries: list[llvm.ResourceTracker] = []

    def key(self, name: str) -> str:
        text = "|".join(
            [name, source_digest(), self.target.key, llvmlite.__version__, ".".join(map(str, llvm.llvm_version_info))]
        )
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def module(self, name: str) -> ir.Module:
        m = ir.Module(name)
        m.triple = self._machine.triple
        m.data_layout = str(self._machine.target_data)
        return m

    def optimise(self, module: ir.Module) -> llvm.ModuleRef:
        """Verified and optimised. LLVM's vectorisers and unroller are off: the emitter has decided these things, and

        unrolling a rolled super-block makes LLVM reorder loads, which defeats the hardware prefetcher.
        """
        try:
            m = llvm.parse_assembly(str(module))
            m.verify()
        except RuntimeError as e:
            raise JitError(f"kernel module {module.name}: {' '.join(str(e).split())}") from e
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
        builder = llvm.create_pass_builder(self._machine, options)
        builder.getModulePassManager().run(m, builder)
        return m

    def object(self, name: str, build: Callable[[ir.Module], None]) -> bytes:
        """Machine code of the module that `build` fills; `name` must determine what build does. Cached on disk."""
        key = self.key(name)
        found = self.cache.get(key)
        if found is not None:
            self.cached += 1
            return found
        module = self.module(name)
        build(module)
        data: bytes = self._machine.emit_object(self.optimise(module))
        self.compiled += 1
        self.cache.put(key, data)
        return data

    def assembly(self, name: str, build: Callable[[ir.Module], None]) -> str:
        """The target's assembly text of a module, for reading."""
        module = self.module(name)
        build(module)
        return str(self._machine.emit_assembly(self.optimise(module)))

    def link(self, name: str, build: Callable[[ir.Module], None], *symbols: str) -> tuple[int, ...]:
        """Addresses of the named functions of a module."""
        data = self.object(name, build)
        if self._jit is None:
            self._jit = llvm.create_lljit_compiler(self.target.machine(), use_jit_link=False)
        library = llvm.JITLibraryBuilder().add_object_img(data).add_current_process()
        for s in symbols:
            library.export_symbol(s)
        tracker = library.link(self._jit, f"{name}#{len(self._libraries)}")
        self._libraries.append(tracker)
        return tuple(tracker[s] for s in symbols)
