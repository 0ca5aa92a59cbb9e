"""colibri verify: read every byte of a model once and name what is broken."""

from __future__ import annotations

import typer

from colibri_offload.cli.flags import Json, ModelArgument
from colibri_offload.cli.output import Meter, note, print_json


def verify(model: ModelArgument, json: Json = False) -> None:
    """Check a store's checksums, or every header and number of a GGUF or safetensors model. Exit code 1 when broken."""
    from colibri_offload.cli.checks import check_model  # late: --help needs no compiler
    from colibri_offload.scheduler.memory import format_size

    with Meter() as meter:
        broken = check_model(model, meter)
    if json:
        print_json({"model": model, "ok": not broken, "checked_bytes": meter.done, "broken": broken})
    elif broken:
        print("\n".join(broken))
    else:
        print(f"{model}: {format_size(meter.done)} checked, nothing is broken")
    if broken:
        note(f"error: {model}: {len(broken)} part(s) are broken; download or convert the model again")
        raise typer.Exit(1)
