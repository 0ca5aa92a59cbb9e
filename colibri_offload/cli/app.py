"""The command `colibri` and its subcommands."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from colibri_offload import __version__
from colibri_offload.cli.bench import bench
from colibri_offload.cli.chat import chat
from colibri_offload.cli.convert import convert
from colibri_offload.cli.demo import demo
from colibri_offload.cli.families import families
from colibri_offload.cli.inspect import inspect
from colibri_offload.cli.run import run
from colibri_offload.cli.verify import verify

DEBUG = "COLIBRI_DEBUG"
_SETTINGS = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(name="colibri", add_completion=False, rich_markup_mode=None, context_settings=_SETTINGS)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"colibri-offload {__version__}")
        raise typer.Exit


def _debug(wanted: bool) -> None:
    if wanted:
        os.environ[DEBUG] = "1"


@app.callback()
def colibri(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", callback=_debug, is_eager=True, help=f"Show tracebacks (or set {DEBUG}=1).")
    ] = False,
) -> None:
    """Run Mixture-of-Experts language models larger than memory.

    `colibri -m MODEL -p PROMPT` is short for `colibri run`.
    """


for command in (run, chat, demo, convert, inspect, verify, bench, families):
    app.command()(command)
