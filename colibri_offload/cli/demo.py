"""colibri demo: the bundled model at work with a cache too small for it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from colibri_offload.cli.flags import LOAD, SAMPLING, Json, MaxTokens, takes
from colibri_offload.cli.output import print_json, table
from colibri_offload.errors import UsageError
from colibri_offload.options import LoadOptions
from colibri_offload.text.sampling import Sampling


@takes(LOAD.but(expert_cache="8"), SAMPLING.but(temperature=0.7, top_p=0.95, repeat_penalty=1.1, seed=1))
def demo(
    load: LoadOptions,
    sampling: Sampling,
    prompt: Annotated[str, typer.Option("-p", "--prompt", metavar="TEXT", help="Text to continue.")] = (
        "And it came to pass"
    ),
    max_tokens: MaxTokens = 64,
    json: Json = False,
) -> None:
    """Generate with the bundled model, 8 of its 32 experts per layer in memory, and show what the cache did.

    It continues three kinds of text: try -p "The following example shows" and -p "def __init__(self".
    """
    if not prompt:
        raise UsageError("the prompt is empty: give at least one character")
    from colibri_offload.cli.loading import loaded  # late: usage errors and --help need no compiler
    from colibri_offload.cli.stats import cache_rows
    from colibri_offload.models import DEMO
    from colibri_offload.session import RunStats

    with loaded(DEMO, load) as engine:
        if json:
            out = engine.generate(prompt, max_tokens, sampling)
            print_json({"text": out.text, "token_ids": out.token_ids, "stats": asdict(out.stats)})
            return
        finished: list[RunStats] = []
        print(prompt, end="", flush=True)
        for piece in engine.stream(prompt, max_tokens, sampling, on_finish=finished.append):
            print(piece, end="", flush=True)
    print("\n\n" + table(cache_rows(finished[0])))
