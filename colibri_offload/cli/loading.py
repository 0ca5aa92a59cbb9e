"""Loading a model for a command: with a progress bar, a line that says what lies where, and warnings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from colibri_offload.cli.output import Meter, note
from colibri_offload.engine import Engine
from colibri_offload.options import LoadOptions
from colibri_offload.scheduler.memory import format_size


@contextmanager
def loaded(model: str, options: LoadOptions) -> Iterator[Engine]:
    """The engine, closed at the end."""
    asked = [f"--{name.replace('_', '-')}" for name in options.gpu_options()]
    if asked:
        note(f"warning: {', '.join(asked)}: this version has no GPU backend; everything runs on the CPU")
        options = options.without_gpu()
    with Meter() as meter:
        engine = Engine.load(model, progress=meter, **vars(options))
    with engine:
        note(summary(engine))
        yield engine


def summary(engine: Engine) -> str:
    """What is resident, what is cached and what stays on disk, with sizes."""
    runtime, source = engine.runtime, engine.runtime.source
    sizes = runtime.sizes
    total = sum(source.expert_layouts[i].nbytes * n for i, n in source.experts_per_layer.items())
    cached = total * sizes.slots // sizes.total_blocks
    return (
        f"{source.spec.family} ({source.kind}): {format_size(source.resident_nbytes)} resident, "
        f"{sizes.slots} of {sizes.total_blocks} experts cached ({format_size(cached)}), "
        f"{format_size(total - cached)} left on disk; memory budget {format_size(runtime.budget.total_bytes)}, "
        f"context {sizes.ctx}, {sizes.threads} thread{'s' if sizes.threads != 1 else ''}"
    )
