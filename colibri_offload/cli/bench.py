"""colibri bench: how fast a model runs here."""

from __future__ import annotations

from typing import Annotated

import typer

from colibri_offload.cli.flags import LOAD, Json, ModelArgument, takes, whole_number
from colibri_offload.cli.output import Meter, print_json, table
from colibri_offload.options import LoadOptions

Count = typer.Option(parser=whole_number, metavar="N")


@takes(LOAD)
def bench(
    load: LoadOptions,
    model: ModelArgument,
    prompt_tokens: Annotated[int, Count] = 512,
    decode_tokens: Annotated[int, Count] = 64,
    runs: Annotated[int, Count] = 5,
    json: Json = False,
) -> None:
    """Measure prefill and decode on random prompts: a warm-up, then RUNS runs; medians and spread."""
    from colibri_offload.cli.loading import loaded  # late: usage errors and --help need no compiler
    from colibri_offload.scheduler.memory import format_size
    from colibri_offload.tuning.bench import Spread
    from colibri_offload.tuning.bench import bench as measure

    with loaded(model, load) as engine:
        with Meter() as meter:
            report = measure(
                engine, prompt_tokens=prompt_tokens, decode_tokens=decode_tokens, runs=runs,
                progress=lambda done, total: meter("measuring", done, total),
            )  # fmt: skip
        if json:
            print_json(report.values())
            return
    s, last = report.spreads(), report.values()

    def row(name: str, spread: Spread, unit: str, digits: int = 1, scale: float = 1.0) -> list[str]:
        numbers = [f"{scale * x:.{digits}f}" for x in (spread.median, spread.min, spread.max)]
        return [name, *numbers, unit]

    rows = [
        ["", "median", "min", "max", ""],
        row("time to first token", s["ttft_sec"], "ms", 1, 1e3),
        row("prefill", s["prefill_tokens_per_sec"], "tokens/s"),
        row("decode", s["decode_tokens_per_sec"], "tokens/s"),
        row("expert hit rate", s["expert_hit_rate"], "%", 1, 100),
        row("read per token", s["bytes_read_per_token"], "MiB", 2, 2**-20),
        row("disk", s["disk_bytes_per_sec"], "MiB/s", 1, 2**-20),
        row("waited for experts", s["stall_sec_per_token"], "ms/token", 2, 1e3),
        row("processor", s["cpu_percent"], "%", 0),
    ]
    print(table(rows))
    peak, budget = format_size(last["peak_memory_bytes"]), format_size(last["memory_budget_bytes"])
    print(f"{prompt_tokens} prompt and {decode_tokens} decode tokens, {runs} runs; peak memory {peak} of {budget}")
