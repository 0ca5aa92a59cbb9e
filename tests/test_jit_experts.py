"""The expert feed-forward: gate, up, activation, down, combination, against float64 on identically rounded inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from jit_util import (
    Packed,
    Weights,
    aligned,
    error,
    floats,
    intact,
    kernels,
    pack_tokens,
    random_rows,
    rounded_activations,
    run,
    weights_of,
)

from colibri_offload.jit.formats import FORMATS, ROWS
from colibri_offload.jit.kernels.activations import activations_for, padded_tokens, tile_counts
from colibri_offload.jit.kernels.experts import Combine, ExpertActivation, Experts, Resolve, Segment

SILU, OAI = ExpertActivation("silu"), ExpertActivation("swiglu_oai", 1.702, 7.0)


@dataclass(frozen=True)
class Case:
    """hidden H, width I; formats of gate, up and down."""

    gate: str
    up: str
    down: str
    mode: str
    hidden: int = 96
    width: int = 80
    f: ExpertActivation = SILU
    bias: bool = False


CASES = {
    "q4_0": Case("Q4_0", "Q4_0", "Q4_0", "int8", width=96),
    "q8_0_float32": Case("Q8_0", "Q8_0", "Q8_0", "float32", width=160),
    "f16": Case("F16", "F16", "F16", "float32", hidden=72, width=40),
    "mxfp4_oai_bias": Case("MXFP4", "MXFP4", "MXFP4", "int8", width=96, f=OAI, bias=True),
    "bf16_oai_bias": Case("BF16", "BF16", "BF16", "float32", hidden=80, width=72, f=OAI, bias=True),
    "k_mixed": Case("Q4_K", "Q4_K", "Q6_K", "int8", hidden=256, width=256),
    "gate_up_differ": Case("Q4_0", "Q8_0", "Q5_1", "int8", width=64, bias=True),
    "steps_differ": Case("MXFP4", "Q4_K", "Q8_0", "int8", hidden=256, width=64),
    "steps_differ_float": Case("F16", "Q4_K", "Q8_0", "float32", hidden=256, width=64),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@dataclass(frozen=True)
class Expert:
    """One expert's record, and its values in float64."""

    gate: Weights
    up: Weights
    down: Weights
    biases: tuple[np.ndarray, np.ndarray, np.ndarray]  # float32, of gate, up and down
    record: np.ndarray
    down_at: int
    bias_at: int

    @property
    def hidden_blocks(self) -> int:
        return -(-self.gate.rows // 32)


@cache
def expert(case: Case, seed: int) -> Expert:
    """A random expert. Record: per 32 hidden units two groups of gate and two of up; then down; then f32 biases."""
    k, rng = kernels(), np.random.default_rng(seed)
    gate, up, down = (
        weights_of(k, FORMATS[name], random_rows(FORMATS[name], rng, rows, cols), cols)
        for name, rows, cols in (
            (case.gate, case.width, case.hidden),
            (case.up, case.width, case.hidden),
            (case.down, case.hidden, case.width),
        )
    )
    blocks = -(-case.width // 32)

    def pairs(w: Weights) -> np.ndarray:
        """uint8 [blocks, two groups]; a missing last group is zero."""
        size = w.fmt.group_nbytes(w.cols)
        out = np.zeros(2 * blocks * size, np.uint8)
        out[: w.packed.nbytes] = w.packed
        return out.reshape(blocks, 2 * size)

    def padded(x: np.ndarray, n: int) -> np.ndarray:
        return np.concatenate([x, np.zeros(n - len(x), np.float32)]).view(np.uint8)

    scale = float(case.bias)
    b_gate, b_up, b_down = (
        (rng.standard_normal(n) * scale).astype(np.float32) for n in (case.width, case.width, case.hidden)
    )
    sections = [
        np.concatenate([pairs(gate), pairs(up)], 1).ravel(),
        down.packed,
        padded(b_gate, 32 * blocks),
        padded(b_up, 32 * blocks),
        padded(b_down, ROWS * down.groups),
    ]
    record = aligned(sum(s.nbytes for s in sections))
    record[:] = np.concatenate(sections)
    down_at = sections[0].nbytes
    bias_at = down_at + down.packed.nbytes if case.bias else -1
    return Expert(gate, up, down, (b_gate, b_up, b_down), record, down_at, bias_at)


@dataclass(frozen=True)
class Work:
    """Tokens of one expert: x [T, H], and the output row of each."""

    expert: Expert
    x: np.ndarray
    rows: list[int]


def feed_forward(case: Case, work: list[Work], chunk: int = 1) -> tuple[np.ndarray, list[Packed]]:
    """(y float32 [rows, H], hidden units of each expert), all experts in one call per kernel."""
    k, first = kernels(), work[0].expert
    x_act, h_act = activations_for(first.gate.fmt, case.mode), activations_for(first.down.fmt, case.mode)
    h_blocks, x_blocks = first.down.blocks, max(first.gate.blocks, first.up.blocks)
    trash = max(r for w in work for r in w.rows) + 1
    y = floats(trash + 1, ROWS * first.down.groups, fill=7.0)
    segments = Segment.new(len(work))
    keep, hidden = [], []
    for segment, w in zip(segments, work, strict=True):
        n = len(w.x)
        packed = pack_tokens(k, x_act, w.x, x_blocks)
        h = Packed(aligned(h_act.nbytes(n, h_blocks)), h_act, n, h_blocks)
        rows = np.full(padded_tokens(n), trash, np.int32)
        rows[:n] = w.rows
        full, tail = tile_counts(n)
        segment["record"], segment["x"], segment["h"], segment["rows"] = (
            a.ctypes.data for a in (w.expert.record, packed.data, h.data, rows)
        )
        segment["full_tiles"], segment["tail_tile"] = full, tail
        keep += [packed, rows]
        hidden.append(h)
    up_tasks, down_tasks = -(-first.hidden_blocks // chunk), -(-first.down.groups // chunk)
    fields = {
        "segments": segments, "y": y, "y_stride": y.strides[0], "x_blocks": x_blocks, "h_blocks": h_blocks,
        "hidden_blocks": first.hidden_blocks, "gate_steps": first.gate.steps,
        "up_steps": first.up.steps, "down_steps": first.down.steps,
        "down_at": first.down_at, "bias_at": first.bias_at, "groups": first.down.groups, "up_chunk": chunk,
        "up_tasks": up_tasks, "down_chunk": chunk, "down_tasks": down_tasks,
    }  # fmt: skip
    up = k.experts_up(first.gate.fmt, first.up.fmt, x_act, h_act, case.f)
    run(up, Experts, len(work) * up_tasks, **fields)
    run(k.experts_down(first.down.fmt, h_act), Experts, len(work) * down_tasks, **fields)
    assert intact(y) and all(intact(h.data) for h in hidden)
    return y[:trash, : case.hidden], hidden


def exact_hidden(case: Case, e: Expert, x: np.ndarray) -> np.ndarray:
    """float64 [T, I]."""
    x = rounded_activations(activations_for(e.gate.fmt, case.mode), x)
    gate, up = x @ e.gate.values.T + e.biases[0], x @ e.up.values.T + e.biases[1]
    if case.f.kind == "silu":
        return gate / (1 + np.exp(-gate)) * up
    gate, up = np.minimum(gate, case.f.limit), up.clip(-case.f.limit, case.f.limit)
    return (up + 1) * gate / (1 + np.exp(-case.f.alpha * gate))


def tokens(case: Case, n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, case.hidden)).astype(np.float32)


@every_case
def test_feed_forward(case: Case) -> None:
    """Three experts with different numbers of tokens in one call; hidden units and outputs each against float64."""
    counts, work, row = (1, 13, 6), [], 0
    for i, n in enumerate(counts):
        rows = list(range(row, row + n))[::-1]
        work.append(Work(expert(case, i), tokens(case, n, i), rows))
        row += n
    y, hidden = feed_forward(case, work)
    for w, h in zip(work, hidden, strict=True):
        stored, want = h.floats(), exact_hidden(case, w.expert, w.x)
        _, scales, _ = h.unpack()
        rounding = np.repeat(scales[: len(w.x)], 32, 1) / 2 if case.mode == "int8" else 0
        tolerance = rounding + 5e-6 * np.abs(want).max()
        padded = np.zeros_like(stored)
        padded[:, : case.width] = want
        assert (np.abs(stored - padded) <= tolerance).all()
        # the down product, from the hidden units as they were stored
        out = stored[:, : case.width] @ w.expert.down.values.T + w.expert.biases[2]
        assert error(y[w.rows], out) < 3e-6


@every_case
def test_a_pair_does_not_depend_on_its_company(case: Case) -> None:
    """Tokens alone or together (1 … 13), experts in any order, any chunk size: the same bits."""
    x = tokens(case, 13)
    experts = [expert(case, i) for i in range(2)]
    alone = [np.concatenate([feed_forward(case, [Work(e, x[t : t + 1], [0])])[0] for t in range(13)]) for e in experts]
    for n in (1, 2, 3, 5, 8, 13):
        for chunk in (1, 2, 7):
            together = [Work(e, x[:n], list(range(i * n, i * n + n))) for i, e in enumerate(experts)]
            for order in (together, together[::-1]):
                y, _ = feed_forward(case, order, chunk)
                assert np.array_equal(y, np.concatenate([a[:n] for a in alone]))


def test_the_activation_of_padding_units_is_zero() -> None:
    """80 hidden units in 3 blocks of 32 in 2 steps of 64: what lies behind them weighs nothing in the down product."""
    case = Case("Q8_0", "Q8_0", "F16", "int8", width=80, f=OAI)
    _, (h,) = feed_forward(case, [Work(expert(case, 0), tokens(case, 3), [0, 1, 2])])
    assert np.any(h.floats()[:, :80]) and not np.any(h.floats()[:, 80:])


def test_resolve() -> None:
    """The records of the chosen experts, by a layer's table of addresses; other segments and fields stay."""
    table = np.arange(100, 108, dtype=np.uint64)
    ids = np.array([7, 0, 7, 3], np.int32)
    segments = Segment.new(5)
    segments["record"], segments["full_tiles"] = 1, 9
    run(kernels().resolve(), Resolve, 1, ids=ids, table=table, segments=segments, count=4)
    assert segments["record"].tolist() == [107, 100, 107, 103, 1]
    assert (segments["full_tiles"] == 9).all() and not segments["x"].any()


# ---- combine
def combine(
    x: np.ndarray, y: np.ndarray, weights: np.ndarray, shared: np.ndarray | None = None, gate: np.ndarray | None = None,
    chunk: int = 32,
) -> np.ndarray:  # fmt: skip
    """x [T, C] + Σ_r weights[t, r] · y[t·R + r] + sigmoid(gate) · shared."""
    out, (n, columns) = x.copy(), x.shape
    tasks = -(-columns // chunk)
    run(
        kernels().combine(), Combine, n * tasks, x=out, y=y, weights=weights, shared=0 if shared is None else shared,
        shared_gate=0 if gate is None else gate, x_stride=out.strides[0], y_stride=y.strides[0],
        weights_stride=weights.strides[0], gate_stride=0 if gate is None else gate.strides[0], ranks=weights.shape[1],
        columns=columns, chunk=chunk, tasks_per_token=tasks,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("with_shared", ["none", "plain", "gated"])
@pytest.mark.parametrize("ranks", [0, 1, 2, 8])
def test_combine(ranks: int, with_shared: str) -> None:
    rng = np.random.default_rng(ranks)
    x, shared = rng.standard_normal((2, 5, 112)).astype(np.float32)
    y = rng.standard_normal((max(1, 5 * ranks), 112)).astype(np.float32)
    weights = rng.uniform(0, 1, (5, ranks)).astype(np.float32)
    gate = rng.standard_normal((5, 16)).astype(np.float32)
    pairs = y[: 5 * ranks].reshape(5, ranks, 112).astype(np.float64)
    want = x + np.einsum("tr,trc->tc", weights, pairs)
    if with_shared != "none":
        factor = 1 / (1 + np.exp(-gate[:, :1].astype(np.float64))) if with_shared == "gated" else 1
        want = want + factor * shared
    fields = {
        "shared": None if with_shared == "none" else shared,
        "gate": gate if with_shared == "gated" else None,
    }
    got = combine(x, y, weights, fields["shared"], fields["gate"])
    assert error(got, want) < 1e-6
    for chunk in (16, 48, 112):
        assert np.array_equal(combine(x, y, weights, fields["shared"], fields["gate"], chunk), got)
    for t in range(5):
        rows = slice(t * ranks, (t + 1) * ranks) if ranks else slice(0, 1)
        one: dict[str, Any] = {n: None if v is None else v[t : t + 1] for n, v in fields.items()}
        assert np.array_equal(combine(x[t : t + 1], y[rows], weights[t : t + 1], **one)[0], got[t])


def test_combine_adds_in_rank_order() -> None:
    """Huge terms that cancel show the order: (1e8 + 1) − 1e8 is 0 in float32, (1e8 − 1e8) + 1 is 1."""
    y = np.repeat(np.array([[1e8], [1], [-1e8]], np.float32), 16, 1)
    ones = np.ones((1, 3), np.float32)
    zero = np.zeros((1, 16), np.float32)
    assert (combine(zero, y, ones) == 0).all()
    assert (combine(zero, y[[0, 2, 1]], ones) == 1).all()
