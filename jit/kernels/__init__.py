"""Kernels by what they compute. Each is a task function `void f(ptr args, i64 task)`; `Kernels` compiles them on
demand."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import llvmlite.ir as ir

from colibri_offload.jit.compiler import Compiler
from colibri_offload.jit.formats import Format
from colibri_offload.jit.kernels import attention, experts, matmul, pack, router, rows
from colibri_offload.jit.kernels.activations import Activations
from colibri_offload.jit.kernels.experts import ExpertActivation
from colibri_offload.jit.kernels.router import RouterRule
from colibri_offload.jit.pool import emit_run_tasks


class Kernels:
    """Addresses of specialised kernels, compiled once per process and cached on disk. Safe for several threads."""

    def __init__(self, compiler: Compiler):
        self.compiler, self.target = compiler, compiler.target
        self._addresses: dict[str, int] = {}
        self._lock = threading.Lock()
        (run_tasks,) = compiler.link("run_tasks", lambda m: emit_run_tasks(m, compiler), "run_tasks")
        self._run_tasks = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(run_tasks)

    def run(self, fn: int, args: int, tasks: int) -> None:
        """Run a kernel's tasks one after another in the calling thread, with the GIL released."""
        self._run_tasks(fn, args, tasks)

    def _get(self, name: str, symbol: str, build: Callable[[ir.Module], None]) -> int:
        with self._lock:  # several reader threads may want to pack the first blocks of a format at once
            if name not in self._addresses:
                (self._addresses[name],) = self.compiler.link(name, build, symbol)
            return self._addresses[name]

    def matmul(self, fmt: Format, act: Activations) -> int:
        return self._get(
            f"matmul.{fmt.name}.{act.name}", "matmul", lambda m: matmul.emit_matmul(m, self.target, fmt, act)
        )

    def pack_weights(self, fmt: Format) -> int:
        return self._get(
            f"pack_weights.{fmt.name}", "pack_weights", lambda m: pack.emit_pack_weights(m, self.target, fmt)
        )

    def pack_tokens(self, act: Activations) -> int:
        return self._get(f"pack_tokens.{act.name}", "pack_tokens", lambda m: pack.emit_pack_tokens(m, self.target, act))

    def gather_rows(self, fmt: Format) -> int:
        return self._get(f"gather_rows.{fmt.name}", "gather_rows", lambda m: rows.emit_gather_rows(m, self.target, fmt))

    def rope(self, dim: int, pairs: int, interleaved: bool) -> int:
        return self._get(
            f"rope.{dim}.{pairs}.{interleaved}", "rope",
            lambda m: attention.emit_rope(m, self.target, dim, pairs, interleaved),
        )  # fmt: skip

    def store_kv(self, key_dim: int, value_dim: int, kv_type: str) -> int:
        return self._get(
            f"store_kv.{key_dim}.{value_dim}.{kv_type}", "store_kv",
            lambda m: attention.emit_store_kv(m, self.target, key_dim, value_dim, kv_type),
        )  # fmt: skip

    def attend(self, key_dim: int, value_dim: int, queries: int, kv_type: str) -> int:
        return self._get(
            f"attend.{key_dim}.{value_dim}.{queries}.{kv_type}", "attend",
            lambda m: attention.emit_attend(m, self.target, key_dim, value_dim, queries, kv_type),
        )  # fmt: skip

    def route(self, rule: RouterRule) -> int:
        return self._get(f"route.{rule}", "route", lambda m: router.emit_route(m, self.target, rule))

    def experts_up(self, gate: Format, up: Format, x_act: Activations, h_act: Activations, f: ExpertActivation) -> int:
        return self._get(
            f"experts_up.{gate.name}.{up.name}.{x_act.name}.{h_act.name}.{f}", "experts_up",
            lambda m: experts.emit_experts_up(m, self.target, gate, up, x_act, h_act, f),
        )  # fmt: skip

    def experts_down(self, fmt: Format, h_act: Activations) -> int:
        return self._get(
            f"experts_down.{fmt.name}.{h_act.name}", "experts_down",
            lambda m: experts.emit_experts_down(m, self.target, fmt, h_act),
        )  # fmt: skip

    def resolve(self) -> int:
        return self._get("resolve", "resolve", lambda m: experts.emit_resolve(m, self.target))

    def combine(self) -> int:
        return self._get("combine", "combine", lambda m: experts.emit_combine(m, self.target))
