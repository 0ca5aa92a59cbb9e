"""colibri run: continue a prompt, or answer it through the model's chat template."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from colibri_offload.cli.flags import LOAD, SAMPLING, Json, MaxTokens, Model, takes
from colibri_offload.cli.output import print_json, table
from colibri_offload.cli.prompt import read_prompt
from colibri_offload.options import LoadOptions
from colibri_offload.text.sampling import Sampling


@takes(LOAD, SAMPLING)
def run(
    load: LoadOptions,
    sampling: Sampling,
    model: Model,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt; -: stdin.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(metavar="FILE", help="A file with the prompt.")] = None,
    max_tokens: MaxTokens = 128,
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")] = False,
    json: Json = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print statistics on stderr at the end.")] = False,
) -> None:
    """Generate text from a prompt. The text goes to stdout, everything else to stderr."""
    text = read_prompt(prompt, prompt_file)
    from colibri_offload.cli.loading import loaded  # late: usage errors and --help need no compiler
    from colibri_offload.cli.stats import all_rows
    from colibri_offload.engine import Prompt
    from colibri_offload.session import RunStats

    with loaded(model, load) as engine:
        ask: Prompt = text
        if engine.tokenizer.chat_template and not raw:
            ask = engine.tokenizer.encode_chat([{"role": "user", "content": text}])
        finished: list[RunStats] = []
        if json:
            out = engine.generate(ask, max_tokens, sampling)
            print_json({"text": out.text, "token_ids": out.token_ids, "stats": asdict(out.stats)})
            finished.append(out.stats)
        else:
            for piece in engine.stream(ask, max_tokens, sampling, on_finish=finished.append):
                print(piece, end="", flush=True)
            print(flush=True)
    if stats:
        print(table(all_rows(finished[0])), file=sys.stderr)
