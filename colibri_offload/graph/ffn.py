"""The feed-forward half of a layer: router, expert blocks out of the cache, shared experts, the weighted sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from colibri_offload.families.spec import Layer, MoE
from colibri_offload.graph.context import Context
from colibri_offload.graph.experts import ExpertRunner
from colibri_offload.graph.ops import Builder, Packed
from colibri_offload.graph.routed import PairTables
from colibri_offload.graph.source import ModelSource
from colibri_offload.graph.step import pair_capacity, stride
from colibri_offload.jit.kernels.activations import FLOAT32, Activations
from colibri_offload.jit.kernels.experts import Combine, Resolve
from colibri_offload.jit.kernels.router import Route, RouterRule
from colibri_offload.scheduler.cache import ExpertCache

_COMBINE_CHUNK = 512  # columns per task of one decoded token


class FeedForward:
    """One layer's feed-forward: add_front() puts norm, router and choice into the layer's program, run() does the rest.

    routed: experts chosen per token. whole: one block that every token passes: a shared expert, or a dense layer
    (resident, or streamed as the layer's only expert).
    """

    def __init__(self, c: Context, source: ModelSource, layer: int, slot_addresses: np.ndarray):
        self._c, self._source, self._layer, self._slot_addresses = c, source, layer, slot_addresses
        spec: Layer = source.spec.layers[layer]
        ffn = spec.ffn
        self._norm_eps, self._hidden = spec.post_norm.eps, source.spec.hidden
        self.moe = ffn if isinstance(ffn, MoE) else None
        self.routed: ExpertRunner | None = None
        self.whole: ExpertRunner | None = None
        self._whole_address = 0
        self.streamed = self.moe is None and layer in source.expert_layouts
        if self.moe:
            self.routed = self._routed_runner()
            self._pairs = PairTables(c, self._hidden, self.routed.x_act, pair_capacity(source, c.step.capacity, ffn))
        if not self.streamed and (self.moe is None or self.moe.shared):
            _, self._whole_address = c.resident.record(self._whole_name, layer)
        self.whole = self._whole_runner()
        self._all_rows = np.arange(c.step.capacity + 16, dtype=np.int32)
        self._experts, self._combine = self._build_experts(), self._build_combine()

    # ---- building
    def _routed_runner(self) -> ExpertRunner:
        assert self.moe
        layout = self._source.expert_layouts[self._layer]
        return ExpertRunner(self._c, layout, self.moe.activation, h="pair_h", y="pair_y", max_segments=self.moe.experts)

    @property
    def _whole_name(self) -> str:
        return "shared" if self.moe else "ffn"

    def _whole_runner(self) -> ExpertRunner | None:
        ffn = self._source.spec.layers[self._layer].ffn
        if self.moe and not self.moe.shared:
            return None
        if self.streamed:
            layout = self._source.expert_layouts[self._layer]
        else:
            layout, _ = self._c.resident.record(self._whole_name, self._layer)
        h, y = ("shared_h", "shared_y") if self.moe else ("pair_h", "pair_y")
        return ExpertRunner(self._c, layout, ffn.activation, h=h, y=y, max_segments=1)

    def add_decode(self, b: Builder, table: np.ndarray) -> None:
        """Everything after the choice for one token, when every block is resident: table[expert] is its address.

        The same kernels on the same numbers as run(), with runners of its own whose segments stay as they are set here.
        """
        c, runners = self._c, []
        if self.routed:
            assert self.moe
            k, routed = self.moe.top_k, self._routed_runner()
            x = self._packed(routed.x_act).address
            routed.set([0] * k, x, range(k), [1] * k, self._all_rows.ctypes.data)
            runners.append(routed)
            b.stage()
            b.add(
                c.kernels.resolve(), Resolve, lambda n: 1, ids=c.workspace["topk_ids"], table=table.ctypes.data,
                segments=routed.segments_address, count=k,
            )  # fmt: skip
        whole = self._whole_runner()
        if whole:
            address = int(table[0]) if self.streamed else self._whole_address
            whole.set([address], self._packed(whole.x_act).address, [0], [1], self._all_rows.ctypes.data)
            runners.append(whole)
        _add_up_and_down(b, runners)
        self._add_combine(b)

    def _packed(self, act: Activations) -> Packed:
        """The normed hidden state of the whole step."""
        return Packed(self._c.workspace[f"x_{act.name}"], act, self._hidden)

    def add_front(self, b: Builder) -> None:
        """Norm and pack; then the router's logits, the shared expert's gate, and the choice."""
        c, r, layer = self._c, self._c.resident, self._layer
        acts = {runner.x_act for runner in (self.routed, self.whole) if runner} | ({FLOAT32} if self.moe else set())
        weight = r.vector("post_norm", layer)
        b.stage()
        for i, act in enumerate(sorted(acts, key=lambda a: a.name)):
            b.pack(
                c.step.hidden, self._packed(act), columns=self._hidden, weight=weight, eps=self._norm_eps,
                rows_out=c.step.normed if i == 0 and self.routed else None,
            )  # fmt: skip
        if self.moe is None:
            return
        logits = c.rows("router_logits", self.moe.experts)
        b.stage()
        b.matmul(r.matrix("router", layer), self._packed(FLOAT32), logits, bias=r.vector("router.bias", layer))
        if self.moe.shared and self.moe.shared.gated:
            b.matmul(r.matrix("shared_gate", layer), self._packed(FLOAT32), c.rows("shared_gate", 1))
        rule = asdict(self.moe.router)
        del rule["bias"]
        b.stage()
        b.add(
            c.kernels.route(RouterRule(experts=self.moe.experts, top_k=self.moe.top_k, **rule)), Route, lambda n: n,
            logits=logits.address, choice_bias=r.vector("router.choice_bias", layer), ids=c.workspace["topk_ids"],
            weights=c.workspace["topk_weights"], logits_stride=logits.stride,
        )  # fmt: skip

    def _build_experts(self) -> Builder:
        b = self._c.builder()
        if self.routed:
            b.stage()
            self._pairs.add_gather(self._c, b)
        runners = [runner for runner in (self.routed, self.whole) if runner]
        _add_up_and_down(b, runners)
        return b.seal()

    def _build_combine(self) -> Builder:
        b = self._c.builder()
        self._add_combine(b)
        return b.seal()

    def _add_combine(self, b: Builder) -> None:
        """hidden += Σ_r w_r·y_r + gate·whole."""
        c = self._c
        b.stage()
        gate = self.moe is not None and self.moe.shared is not None and self.moe.shared.gated
        args = b.add(
            c.kernels.combine(),
            Combine,
            x=c.step.hidden.address,
            x_stride=c.step.hidden.stride,
            y_stride=stride(self._hidden),
            y=self.routed.y.address if self.routed else 0,
            ranks=self.moe.top_k if self.moe else 0,
            weights=c.workspace["topk_weights"] if self.moe else 0,
            weights_stride=4 * self.moe.top_k if self.moe else 0,
            shared=self.whole.y.address if self.whole else 0,
            shared_gate=c.workspace["shared_gate"] if gate else 0,
            gate_stride=stride(1),
            columns=stride(self._hidden) // 4,
        )

        def tasks(n: int) -> int:
            columns = stride(self._hidden) // 4
            args["chunk"] = chunk = _COMBINE_CHUNK if n == 1 else columns
            args["tasks_per_token"] = per = -(-columns // chunk)
            return n * per

        b.counted(tasks)

    # ---- running
    def topk(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """The step's routing: ids int32 [n, K] and weights float32 [n, K], best first (views)."""
        assert self.moe
        shape = (n, self.moe.top_k)
        ws = self._c.workspace
        return ws.array("topk_ids", shape, np.int32), ws.array("topk_weights", shape, np.float32)

    def run(self, n: int, cache: ExpertCache | None, then: Callable[[], None]) -> None:
        """Everything after the choice. `then` is called once this layer's reads are requested (to start guesses)."""
        if self.routed:
            assert cache is not None
            self._run_routed(n, cache, then)
        elif self.streamed:
            assert cache is not None
            with cache.stream(self._layer, [0]) as batches:
                then()
                for ((_, slot),) in batches:
                    self._whole_address = int(self._slot_addresses[slot])
                    self._run_whole(n)
        else:
            self._run_whole(n)
        self._combine.run(n)

    def _set_whole(self, n: int) -> None:
        if self.whole:
            x = self._packed(self.whole.x_act).address
            self.whole.set([self._whole_address], x, [0], [n], self._all_rows.ctypes.data)

    def _run_whole(self, n: int) -> None:
        self._set_whole(n)
        self._experts.run(n, 1)

    def _run_routed(self, n: int, cache: ExpertCache, then: Callable[[], None]) -> None:
        """Resident experts compute while the others load; the shared expert goes along with the first batch."""
        assert self.routed
        ids, _ = self.topk(n)
        experts = self._pairs.begin(ids)
        whole = self._packed(self.routed.x_act).address
        self._set_whole(n)
        with cache.stream(self._layer, experts) as batches:
            then()
            for batch in batches:
                x, first, counts = self._pairs.select([e for e, _ in batch], whole)
                records = self._slot_addresses[[slot for _, slot in batch]]
                self.routed.set(records, x, first, counts, self._pairs.rows_address)
                shared = self.whole.count if self.whole else 0
                self._experts.run(n, (self.routed.count, self._pairs.tile_count, shared))
                if self.whole:
                    self.whole.count = 0


def _add_up_and_down(b: Builder, runners: list[ExpertRunner]) -> None:
    """The two stages of all runners side by side."""
    b.stage()
    for runner in runners:
        runner.add_up(b)
    b.stage()
    for runner in runners:
        runner.add_down(b)
