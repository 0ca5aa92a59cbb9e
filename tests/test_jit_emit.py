"""The emitter: the IR text of small functions, what its operators compute, and flags that no kernel may carry."""

from __future__ import annotations

import re
from collections.abc import Callable
from textwrap import dedent

import llvmlite.ir as ir
import numpy as np
import pytest
from jit_util import CACHE_DIR, TASK, kernels
from test_jit_router import RULES

from colibri_offload.jit.compiler import Compiler
from colibri_offload.jit.emit import Fn, Struct, Val, bf16, f16, f32, i8, i32, i64, ptr, vec
from colibri_offload.jit.formats import FORMATS
from colibri_offload.jit.kernels import Kernels
from colibri_offload.jit.kernels.activations import ACTIVATIONS, FLOAT32, INT8, activations_for
from colibri_offload.jit.kernels.experts import ExpertActivation
from colibri_offload.jit.pool import emit_pool
from colibri_offload.jit.targets import NeonDot, Target, available, get_target


def text(body: Callable[[Fn], None], args: dict[str, ir.Type], ret: ir.Type | None = None) -> str:
    """The body of a function, as IR text; llvmlite's old spelling of pointers is made new."""
    module = ir.Module("m")
    with Fn(module, Target(), "f", args, *([ret] if ret else [])) as k:
        body(k)
    inside = str(module).split("{\n", 1)[1].split("\n}", 1)[0]
    return re.sub(r"\w+\*", "ptr", inside)


def same(got: str, want: str) -> bool:
    return got.strip() == dedent(want).strip()


def test_range() -> None:
    def body(k: Fn) -> None:
        with k.range(0, k.n, 2) as i:
            (k.p + i * 4).store(k.const(f32, 1.0))

    assert same(
        text(body, {"p": ptr, "n": i64}),
        """
        entry:
          %".4" = alloca i64
          store i64 0, ptr %".4"
          br label %"head"
        head:
          %".7" = load i64, ptr %".4"
          %".8" = icmp slt i64 %".7", %"n"
          br i1 %".8", label %"body", label %"end"
        body:
          %".10" = load i64, ptr %".4"
          %".11" = mul i64 %".10", 4
          %".12" = getelementptr i8, ptr %"p", i64 %".11"
          store float 0x3ff0000000000000, ptr %".12", align 4
          %".14" = load i64, ptr %".4"
          %".15" = add i64 %".14", 2
          store i64 %".15", ptr %".4"
          br label %"head"
        end:
          ret void
        """,
    )


def test_loop() -> None:
    def body(k: Fn) -> None:
        with k.loop() as loop:
            v = k.p.load(i64)
            loop.leave_if(v.eq(0))
            loop.again_if(v > 5)
            k.p.store(v - 1)

    assert same(
        text(body, {"p": ptr}),
        """
        entry:
          br label %"loop"
        loop:
          %".4" = load i64, ptr %"p", align 8
          %".5" = icmp eq i64 %".4", 0
          br i1 %".5", label %"left", label %"go_on"
        left:
          ret void
        go_on:
          %".7" = icmp sgt i64 %".4", 5
          br i1 %".7", label %"loop", label %"go_on.1"
        go_on.1:
          %".9" = sub i64 %".4", 1
          store i64 %".9", ptr %"p", align 8
          br label %"loop"
        """,
    )


def test_when_and_either() -> None:
    def body(k: Fn) -> None:
        with k.when(k.n > 0):
            k.p.store(k.n)
        with k.either(k.n.eq(3)) as (yes, no):
            with yes:
                k.p.store(k.n, 8)
            with no:
                k.p.store(k.n, 16)

    assert same(
        text(body, {"p": ptr, "n": i64}),
        """
        entry:
          %".4" = icmp sgt i64 %"n", 0
          br i1 %".4", label %"entry.if", label %"entry.endif"
        entry.if:
          store i64 %"n", ptr %"p", align 8
          br label %"entry.endif"
        entry.endif:
          %".8" = icmp eq i64 %"n", 3
          br i1 %".8", label %"entry.endif.if", label %"entry.endif.else"
        entry.endif.if:
          %".10" = getelementptr i8, ptr %"p", i64 8
          store i64 %"n", ptr %".10", align 8
          br label %"entry.endif.endif"
        entry.endif.else:
          %".13" = getelementptr i8, ptr %"p", i64 16
          store i64 %"n", ptr %".13", align 8
          br label %"entry.endif.endif"
        entry.endif.endif:
          ret void
        """,
    )


Sample = Struct("Sample", p=ptr, n=i32, x=f32, m=i64, q=ptr)


def test_struct_fields() -> None:
    """Kernels load a field where NumPy puts it."""

    def body(k: Fn) -> None:
        s = Sample.at(k.args)
        s.q.store(s.x)
        s.p.store(s.n)

    assert same(
        text(body, {"args": ptr}),
        """
        entry:
          %".3" = getelementptr i8, ptr %"args", i64 24
          %".4" = load ptr, ptr %".3", align 8
          %".5" = getelementptr i8, ptr %"args", i64 12
          %".6" = load float, ptr %".5", align 4
          store float %".6", ptr %".4", align 4
          %".8" = load ptr, ptr %"args", align 8
          %".9" = getelementptr i8, ptr %"args", i64 8
          %".10" = load i32, ptr %".9", align 4
          store i32 %".10", ptr %".8", align 4
          ret void
        """,
    )
    assert Sample.nbytes == 32 and Sample.new(3).nbytes == 96 and not Sample.new().tobytes().strip(b"\0")


def test_struct_padding_follows_alignment() -> None:
    odd = Struct("Odd", a=f32, b=i64, c=i32)
    assert odd.dtype.fields is not None
    assert [odd.dtype.fields[n][1] for n in "abc"] == [0, 8, 16] and odd.nbytes == 24
    with pytest.raises(AttributeError, match="Odd has no field d"):
        text(lambda k: odd.at(k.args).d.store(k.args), {"args": ptr})


def test_fused_and_separate_products() -> None:
    """fma is fmuladd; a product and a sum stay two operations without flags, so the optimiser may not fuse them."""

    def body(k: Fn) -> None:
        a, b = k.p.load(vec(f32, 4)), k.p.load(vec(f32, 4), 16)
        k.p.store(a.fma(b, a))
        k.p.store(a * b + a)

    assert same(
        text(body, {"p": ptr}),
        """
        entry:
          %".3" = load <4 x float>, ptr %"p", align 4
          %".4" = getelementptr i8, ptr %"p", i64 16
          %".5" = load <4 x float>, ptr %".4", align 4
          %".6" = call <4 x float> @"llvm.fmuladd.v4f32"(<4 x float> %".3", <4 x float> %".5", <4 x float> %".3")
          store <4 x float> %".6", ptr %"p", align 4
          %".8" = fmul <4 x float> %".3", %".5"
          %".9" = fadd <4 x float> %".8", %".3"
          store <4 x float> %".9", ptr %"p", align 4
          ret void
        """,
    )


def test_pointer_arguments_do_not_alias() -> None:
    module = ir.Module("m")
    with Fn(module, Target(), "f", {"p": ptr, "n": i64}, inline=False):
        pass
    head = str(module).split("{")[0]
    assert 'define internal void @"f"(ptr noalias %"p", i64 %"n")' in head and "noinline" in head and "nounwind" in head


# ---- what operators compute
def compute(f: Callable[[Fn, Val], Val], x: np.ndarray, t: ir.Type, out: np.ndarray, name: str) -> np.ndarray:
    """f of one value of type t at x, stored at out; compiled for this machine."""
    compiler = Compiler(get_target(), CACHE_DIR)

    def build(module: ir.Module) -> None:
        with Fn(module, compiler.target, "f", {"args": ptr, "task": i64}) as k:
            pair = Pair.at(k.args)
            pair.out.store(f(k, pair.x.load(t, 0, 1)), 0, 1)

    (address,) = compiler.link(f"emit.{name}", build, "f")
    args = Pair.new()
    args["x"], args["out"] = x.ctypes.data, out.ctypes.data
    TASK(address)(args.ctypes.data, 0)
    return out


Pair = Struct("Pair", x=ptr, out=ptr)
INTS = np.array([-7, 7, 0, -(2**31), 2**31 - 1, 1, -1, 100], np.int32)
U = INTS.view(np.uint32)
INTEGER: dict[str, tuple[Callable[[Val], Val], np.ndarray]] = {
    "udiv": (lambda v: v // 3, U // 3),
    "urem": (lambda v: v % 3, U % 3),
    "lshr": (lambda v: v >> 3, U >> 3),
    "shl": (lambda v: v << 3, U << 3),
    "rsub": (lambda v: 5 - v, (5 - INTS.astype(np.int64)).astype(np.int32)),
    "neg": (lambda v: -v, (-INTS.astype(np.int64)).astype(np.int32)),
    "bits": (lambda v: (v & 0xFF) | (v ^ 0x0F0F) & 0xFF00, (U & 0xFF) | (U ^ 0x0F0F) & 0xFF00),
    "smin": (lambda v: v.min(3), np.minimum(INTS, 3)),
    "smax": (lambda v: v.max(-3), np.maximum(INTS, -3)),
    "select": (lambda v: (v > 0).select(v, -v), np.where(INTS > 0, INTS, (-INTS.astype(np.int64)).astype(np.int32))),
    "order": (lambda v: (v <= 0).select(v + 1, v * 2), np.where(INTS <= 0, INTS + 1, (U * 2).view(np.int32))),
    "shuffle": (lambda v: v.part(1, 4).concat(v.part(0, 4)), np.roll(INTS, 4)),
}


@pytest.mark.parametrize("name", INTEGER)
def test_integer_operators(name: str) -> None:
    f, want = INTEGER[name]
    got = compute(lambda k, v: f(v), INTS, vec(i32, 8), np.zeros(8, np.int32), name)
    assert np.array_equal(got, want.astype(want.dtype).view(np.int32))


X = np.array([1.5, -2.25, 0.0, 1e30, -1e-30, 3e38, 7.0, -0.5], np.float32)
FLOAT: dict[str, tuple[Callable[[Val], Val], np.ndarray]] = {
    "fsub": (lambda v: 1.0 - v, np.float32(1) - X),
    "fdiv": (lambda v: v / 3.0, X / np.float32(3)),
    "fneg": (lambda v: -v, -X),
    "abs": (lambda v: v.abs(), np.abs(X)),
    "sqrt": (lambda v: v.abs().sqrt(), np.sqrt(np.abs(X))),
    "fmin": (lambda v: v.min(1.0), np.minimum(X, 1)),
    "fmax": (lambda v: v.max(-1.0), np.maximum(X, -1)),
    "sum": (lambda v: v.sum().splat(8), np.full(8, ((X[0] + X[4]) + (X[2] + X[6])) + ((X[1] + X[5]) + (X[3] + X[7])))),
    "hmax": (lambda v: v.hmax().splat(8), np.full(8, X.max())),
    "lane": (lambda v: v.lane(6).splat(8), np.full(8, X[6])),
}


@pytest.mark.parametrize("name", FLOAT)
def test_float_operators(name: str) -> None:
    f, want = FLOAT[name]
    got = compute(lambda k, v: f(v), X, vec(f32, 8), np.zeros(8, np.float32), name)
    assert np.array_equal(got, want.astype(np.float32))


def test_widening_to_float() -> None:
    halves = np.array([1.5, -2.0**-24, 65504, 0], np.float16)
    upper = (np.array([1.5, -3e38, 1e-40, 0], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    bytes_ = np.array([-128, 127, -1, 0], np.int8)
    for name, x, t, want in (
        ("f16", halves, f16, halves.astype(np.float32)),
        ("bf16", upper, bf16, (upper.astype(np.uint32) << 16).view(np.float32)),
        ("i8", bytes_, i8, bytes_.astype(np.float32)),
    ):
        assert np.array_equal(compute(lambda k, v: v.f32(), x, vec(t, 4), np.zeros(4, np.float32), name), want)


def test_scratch_memory_is_aligned() -> None:
    def address(k: Fn, v: Val) -> Val:
        k.scratch(24)
        return Val(k, k.b.ptrtoint(k.scratch(24).v, i64))

    got = compute(address, np.zeros(1, np.int64), i64, np.zeros(1, np.int64), "scratch")
    assert got[0] % 64 == 0


# ---- every kernel
class Recorder(Compiler):
    """A compiler that keeps the text of each module and compiles nothing."""

    def __init__(self, target: Target):
        super().__init__(target, CACHE_DIR)
        self.texts: dict[str, str] = {}

    def link(self, name: str, build: Callable[[ir.Module], None], *symbols: str) -> tuple[int, ...]:
        module = self.module(name)
        build(module)
        self.texts[name] = str(module)
        return (0,) * len(symbols)


def record(target: Target, formats: list[str], experts: bool = True) -> dict[str, str]:
    """The text of every kind of kernel (or without the large ones); products on these formats, most for int8 only."""
    recorder = Recorder(target)
    k = Kernels(recorder)
    for fmt in (FORMATS[n] for n in formats):
        k.pack_weights(fmt)
        k.gather_rows(fmt)
        k.matmul(fmt, activations_for(fmt, "int8"))
    fmt = FORMATS[formats[0]]
    for act in ACTIVATIONS.values():
        k.pack_tokens(act)
    if experts:
        k.matmul(fmt, FLOAT32)
        k.experts_down(fmt, INT8)
    for f in (ExpertActivation("silu"), ExpertActivation("swiglu_oai", 1.702, 7.0)) if experts else ():
        k.experts_up(fmt, fmt, INT8, INT8, f)
    for kv_type in ("f32", "f16"):
        k.store_kv(32, 16, kv_type)
        k.attend(32, 16, 2, kv_type)
    for interleaved in (False, True):
        k.rope(32, 8, interleaved)
    for rule in RULES.values():
        k.route(rule)
    k.combine()
    recorder.link("pool", lambda m: emit_pool(m, recorder), "worker_loop", "run_program")
    return recorder.texts


SAMPLES = ["Q8_0", "Q5_1", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4", "F16"]
LOOSE = [f" {flag} " for flag in ("fast", "contract", "reassoc", "nnan", "ninf", "nsz", "arcp", "afn")]


@pytest.mark.parametrize("name", [*available(), "neondot"])
def test_no_kernel_lets_the_optimiser_reorder_floats(name: str) -> None:
    """Differently shaped kernels compute the same product and must agree to the bit."""
    target = NeonDot() if name == "neondot" and name not in available() else get_target(name)
    best = name == available()[0]
    texts = record(target, SAMPLES if best else ["Q4_0"], experts=best)
    assert len(texts) > 20
    for kernel, module in texts.items():
        assert not [flag for flag in LOOSE if flag in module], kernel
    assert any("llvm.fmuladd" in module for module in texts.values())


def test_emission_is_deterministic_and_names_tell_kernels_apart() -> None:
    """The object cache finds a kernel by its name: one name, one text; another text, another name."""
    target = kernels().target
    first, second = (record(target, ["Q4_0", "F16"], experts=False) for _ in range(2))
    assert first == second
    bodies = [module.split("\n", 1)[1] for module in first.values()]
    assert len(set(bodies)) == len(bodies)
