"""Targets by name, and the best one for this machine."""

from __future__ import annotations

import os

import llvmlite.binding as llvm

from colibri_offload.errors import UnsupportedError
from colibri_offload.jit.targets.base import Target
from colibri_offload.jit.targets.neon import NeonDot
from colibri_offload.jit.targets.x86 import X86, Avx2, Avx512Vnni

ENVIRONMENT = "COLIBRI_TARGET"
_X86: tuple[type[X86], ...] = (Avx512Vnni, Avx2, X86)

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


def available() -> list[str]:
    """Names of the targets that this machine can run, best first."""
    features = llvm.get_host_cpu_features()
    machine = llvm.get_default_triple().split("-")[0]
    if machine == "x86_64":
        return [t.name for t in _X86 if all(features.get(f) for f in t.needs)] + ["generic"]
    return (["neondot"] if machine == "aarch64" and features.get("dotprod") else []) + ["generic"]


def get_target(name: str | None = None) -> Target:
    """The named target, or the best one (the environment variable COLIBRI_TARGET overrides the choice).

    Raises UnsupportedError for a name that this machine cannot run.
    """
    names = available()
    name = name or os.environ.get(ENVIRONMENT) or names[0]
    if name not in names:
        raise UnsupportedError(f"target {name!r} cannot run on this CPU; choose one of {', '.join(names)}")
    by_name: dict[str, type[Target]] = {t.name: t for t in _X86}
    if name == "neondot":
        return NeonDot.host()
    return by_name[name]() if name in by_name else Target()


__all__ = ["X86", "Avx2", "Avx512Vnni", "NeonDot", "Target", "available", "get_target"]
