"""colibri convert: write a model as a store that loads without any work."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from colibri_offload.cli.output import Meter, note

Quant = Annotated[str, typer.Option(metavar="NAME", help="Format of the weights: `colibri families` lists them.")]
Store = Annotated[str, typer.Option(metavar="file|lmdb", help="One file of experts, or an LMDB environment.")]


def convert(
    model: Annotated[str, typer.Option("--input", metavar="DIR|FILE", help="A GGUF file or safetensors directory.")],
    output: Annotated[str, typer.Option("--output", metavar="DIR", help="The store, which must not exist yet.")],
    quant: Quant = "q8_0",
    store: Store = "file",
    low_memory: Annotated[bool, typer.Option("--low-memory", help="Work in smaller pieces.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted conversion.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a store at the output.")] = False,
) -> None:
    """Convert a model to a store: quantised, checksummed, laid out for fast reading. It appears when it is whole."""
    from colibri_offload.convert import convert as write  # late: usage errors and --help need no compiler
    from colibri_offload.scheduler.memory import format_size

    with Meter() as meter:
        try:
            done = write(
                model, output, quant, store=store, resume=resume, overwrite=overwrite, low_memory=low_memory,  # type: ignore[arg-type]
                progress=meter,
            )  # fmt: skip
        except KeyboardInterrupt:
            command = ["colibri", "convert", "--input", model, "--output", output, "--quant", quant, "--store", store]
            command += ["--low-memory"] * low_memory + ["--overwrite"] * overwrite
            note(
                f"interrupted with {format_size(meter.done)} of {format_size(meter.total)} written; go on with: "
                f"{shlex.join(command)} --resume"
            )
            raise typer.Exit(130) from None
    if done.warning:
        note(f"warning: {done.warning}")
    note(f"{done.path}: {format_size(done.nbytes)}")
