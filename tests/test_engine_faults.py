"""Disks that fail, weights that are damaged, Ctrl-C at any moment: one request suffers, the engine goes on."""

from __future__ import annotations

import errno
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from engine_util import GGUF

from colibri_offload import Engine
from colibri_offload.checkpoint.open import open_checkpoint
from colibri_offload.errors import NumericsError, StoreError
from colibri_offload.graph.source import CheckpointSource
from colibri_offload.jit.compiler import Compiler
from colibri_offload.jit.formats import FORMATS
from colibri_offload.jit.kernels import Kernels
from colibri_offload.jit.targets import get_target
from colibri_offload.storage.base import ExpertKey, ExpertStore
from colibri_offload.storage.wrappers import FaultyStore, WrapperStore

MODEL = GGUF / "qwen3_moe-Q4_0.gguf"
IDS = [17, 300, 4, 88, 201, 9, 9, 45]
NEW = 6


def load(model: Path = MODEL, **options: Any) -> Engine:
    return Engine.load(model, **({"ctx": 128, "memory_budget": "2GiB", "expert_cache": 2} | options))


def generate(engine: Engine) -> list[int]:
    return engine.generate(IDS, max_tokens=NEW, ignore_eos=True).token_ids


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with load() as engine:
        return generate(engine)


@pytest.fixture
def wrap(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[ExpertStore], WrapperStore]], None]:
    """wrap(make): engines loaded from now on read their experts through make(store)."""

    def install(make: Callable[[ExpertStore], WrapperStore]) -> None:
        made: dict[int, WrapperStore] = {}

        def store(source: CheckpointSource) -> WrapperStore:
            if id(source) not in made:
                made[id(source)] = make(source._store)
            return made[id(source)]

        monkeypatch.setattr(CheckpointSource, "store", property(store))

    return install


# ---- disks


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_read_that_fails_once_is_repeated(wrap: Any, expected: list[int], prefetch: bool) -> None:
    """The Nth read of a run fails, for every N up to the last, with one engine after another."""
    faulty: list[FaultyStore] = []
    fail_at = 0

    def make(store: ExpertStore) -> FaultyStore:
        faulty.append(FaultyStore(store, fail_at))
        return faulty[-1]

    wrap(make)
    for fail_at in (1, 2, 3, 7, 20, 50, 10**9):
        with load(prefetch=prefetch, preload=False) as engine:
            assert generate(engine) == expected
            assert faulty[-1].failures == (fail_at < 10**9)
            assert engine.runtime.cache.stats.bytes_read > 0


@pytest.mark.parametrize("fail_at", [1, 2, 9, 30])
def test_a_read_that_cannot_be_repeated_fails_one_request(wrap: Any, expected: list[int], fail_at: int) -> None:
    wrap(lambda store: FaultyStore(store, fail_at, error_number=errno.ENXIO))
    with load(prefetch=False, preload=False) as engine:
        with pytest.raises(StoreError, match=r"layer \d+ expert \d+"):
            generate(engine)
        assert generate(engine) == expected
        assert generate(engine) == expected


class Unplugged(WrapperStore):
    """Every read fails while `broken`, that of `bad` always."""

    broken = False
    bad: ExpertKey | None = None

    def read_into(self, key: ExpertKey, buffer: memoryview) -> int:
        if self.broken or key == self.bad:
            raise StoreError(f"layer {key.layer} expert {key.expert}: unplugged")
        return super().read_into(key, buffer)


def recorded(wrap: Any) -> list[Unplugged]:
    """The stores of engines loaded from now on."""
    stores: list[Unplugged] = []

    def make(store: ExpertStore) -> Unplugged:
        stores.append(Unplugged(store))
        return stores[-1]

    wrap(make)
    return stores


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_disk_that_is_gone_fails_requests_until_it_is_back(wrap: Any, expected: list[int], prefetch: bool) -> None:
    stores = recorded(wrap)
    with load(prefetch=prefetch) as engine:
        assert generate(engine) == expected
        stores[-1].broken = True
        for _ in range(3):
            with pytest.raises(StoreError, match="unplugged"):
                generate(engine)
        with pytest.raises(StoreError, match="unplugged"):
            list(engine.stream(IDS))
        stores[-1].broken = False
        assert generate(engine) == expected


def test_a_failed_read_of_somebody_else_is_repeated_for_who_joined_it(wrap: Any) -> None:
    """A prefetch, or a read that a failed request left in flight, is no reason to fail the request that joins it."""
    key, begun, go = ExpertKey(0, 3), threading.Event(), threading.Event()

    class FirstFails(WrapperStore):
        def read_into(self, key: ExpertKey, buffer: memoryview) -> int:
            if not begun.is_set():
                begun.set()
                assert go.wait(10)
                raise StoreError("unplugged")
            return super().read_into(key, buffer)

    wrap(FirstFails)
    with load(preload=False, prefetch=False) as engine:
        cache = engine.runtime.cache
        assert cache.prefetch([key]) == 1 and begun.wait(10)
        with cache.stream(key.layer, [key.expert]) as batches:
            go.set()
            assert [expert for batch in batches for expert, _ in batch] == [key.expert]


def test_one_lost_expert_fails_only_texts_that_need_it(wrap: Any) -> None:
    with load(expert_cache="auto") as engine, engine.record_routing() as routing:
        engine.logits(IDS)
        needed = {ExpertKey(layer, e) for layer, ids in routing.topk_ids.items() for e in np.unique(ids).tolist()}
        everything = set(engine.runtime.source.store.keys())
        one = engine.logits(IDS[:1])
        needed_by_one = {ExpertKey(layer, int(e)) for layer, ids in routing.topk_ids.items() for e in ids[-1]}
    assert needed <= everything
    lost = sorted(needed - needed_by_one)[0]
    stores = recorded(wrap)
    with load(preload=False, prefetch=False) as engine:
        stores[-1].bad = lost
        for _ in range(2):
            with pytest.raises(StoreError, match=f"layer {lost.layer} expert {lost.expert}: unplugged"):
                engine.logits(IDS)
            np.testing.assert_array_equal(engine.logits(IDS[:1]), one)


def test_a_failure_while_preloading_is_reported_and_cleans_up(wrap: Any) -> None:
    wrap(lambda store: FaultyStore(store, 5, persistent=True))
    before = threading.active_count()
    with pytest.raises(StoreError, match="injected fault"):
        load(expert_cache="auto", preload=True)
    assert threading.active_count() == before


# ---- numbers


def damaged(tmp_path: Path, tensor_name: str) -> Path:
    """A copy of the F16 model whose tensor is all NaN."""
    original = GGUF / "qwen3_moe-F16.gguf"
    path = tmp_path / original.name
    shutil.copyfile(original, path)
    tensor = open_checkpoint(path).tensors[tensor_name]
    (part,) = tensor.slices
    nan = np.full(part.nbytes // 4, np.nan, np.float32)
    if tensor.fmt == "F16":
        nan = np.full(part.nbytes // 2, np.nan, np.float16)
    with open(path, "r+b") as f:
        f.seek(part.offset)
        f.write(nan.tobytes())
    return path


@pytest.mark.parametrize("expert_cache", [1, "auto"])
@pytest.mark.parametrize(
    ("tensor", "where"),
    [
        ("token_embd.weight", "layer 0"),
        ("blk.0.attn_norm.weight", "layer 0"),
        ("blk.1.attn_q.weight", "layer 1"),
        ("blk.2.attn_v.weight", "layer 2"),
        ("blk.1.ffn_gate_inp.weight", "layer 1"),
        ("blk.1.ffn_gate_exps.weight", "layer 1"),
        ("blk.2.ffn_down_exps.weight", "layer 2"),
        ("output_norm.weight", "head"),
        ("output.weight", "head"),
    ],
)
def test_nan_is_reported_with_its_layer(tmp_path: Path, tensor: str, where: str, expert_cache: int | str) -> None:
    with load(damaged(tmp_path, tensor), expert_cache=expert_cache) as engine:
        for prompt in (IDS, IDS[:1]):
            with pytest.raises(NumericsError, match=where):
                engine.generate(prompt)
        with pytest.raises(NumericsError, match=where):
            engine.logits(IDS)


# ---- Ctrl-C


@contextmanager
def interrupted_at(line: int) -> Iterator[list[int]]:
    """Ctrl-C when the main thread has run `line` lines of the engine; yields a list of one, the lines so far."""
    root, lines = str(Path(__file__).parent.parent), [0]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(root) or name == __file__:
            return None
        if event == "line":
            lines[0] += 1
            if lines[0] == line:
                signal.raise_signal(signal.SIGINT)
        return trace

    before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGINT, handler)


def test_an_interrupt_at_any_moment_leaves_the_engine_usable(expected: list[int]) -> None:
    seed = 11
    with load() as engine:
        with interrupted_at(-1) as lines:
            generate(engine)
        interrupts = 0
        for point in random.Random(seed).sample(range(1, lines[0]), 24):
            with interrupted_at(point) as lines:
                try:
                    generate(engine)
                    assert lines[0] < point, "the interrupt was lost"  # runs differ in length: reads come as they come
                except KeyboardInterrupt:
                    interrupts += 1
            assert generate(engine) == expected, f"after an interrupt at line {point} of seed {seed}"
    assert interrupts > 12


def test_an_interrupt_between_pieces_leaves_the_engine_usable(expected: list[int]) -> None:
    with load() as engine:
        with pytest.raises(KeyboardInterrupt):
            for _ in engine.stream(IDS, ignore_eos=True):
                raise KeyboardInterrupt
        assert generate(engine) == expected


def test_a_second_interrupt_does_not_wait_for_the_layer(wrap: Any) -> None:
    """A read that hangs: the first Ctrl-C waits for the layer, the second must not."""
    release = threading.Event()

    class Hanging(WrapperStore):
        def read_into(self, key: ExpertKey, buffer: memoryview) -> int:
            release.wait(30)
            return super().read_into(key, buffer)

    wrap(Hanging)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None
    timers = [threading.Timer(delay, signal.pthread_kill, (main, signal.SIGINT)) for delay in (0.3, 0.6)]
    try:
        with load(preload=False, prefetch=False) as engine:
            for timer in timers:
                timer.start()
            with pytest.raises(KeyboardInterrupt):
                engine.logits(IDS)
            assert not release.is_set()
            release.set()
            assert engine.logits(IDS).shape[0] == len(IDS)
    finally:
        release.set()
        signal.signal(signal.SIGINT, handler)


# ---- threads


def test_threads_that_want_the_same_kernel_at_once_all_get_it(tmp_path: Path) -> None:
    """Reader threads pack the first experts of a format together: two used to link its kernel under one name."""
    kernels = Kernels(Compiler(get_target(), tmp_path))
    formats = list(FORMATS.values())[:4]
    barrier = threading.Barrier(4)
    found: list[list[int]] = []

    def ask() -> None:
        barrier.wait()
        found.append([kernels.pack_weights(fmt) for fmt in formats])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(addresses == found[0] for addresses in found)
