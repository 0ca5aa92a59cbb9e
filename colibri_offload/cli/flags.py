"""Flags that several commands share, as data: their defaults are those of the dataclass that they fill."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

import typer

from colibri_offload.options import LoadOptions
from colibri_offload.text.sampling import Sampling


def whole_number(text: str | int) -> int:
    """Parser of integer flags: unlike typer's own, its message shows the value."""
    try:
        return int(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a whole number") from error


def number(text: str | float) -> float:
    """Parser of float flags."""
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a number") from error


_PARSERS: Mapping[Any, Callable[..., Any]] = {int: whole_number, int | None: whole_number, float: number}


@dataclass(frozen=True)
class Flag:
    """A field of a dataclass as a flag. `names`: how it is written, by default --the-field."""

    field: str
    type: Any
    help: str
    metavar: str | None = None
    names: tuple[str, ...] = ()

    def parameter(self, default: Any) -> inspect.Parameter:
        names = self.names or ("--" + self.field.replace("_", "-"),)
        option = typer.Option(
            *names,
            help=self.help,
            metavar=self.metavar,
            show_default=default is not None,
            parser=_PARSERS.get(self.type),
        )
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.field, kind, default=default, annotation=Annotated[self.type, option])


@dataclass(frozen=True)
class FlagGroup:
    """Flags that together make one value, which a command receives as its parameter `parameter`."""

    parameter: str
    make: Callable[..., Any]
    flags: tuple[Flag, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def but(self, **defaults: Any) -> FlagGroup:
        """The same with other defaults."""
        return replace(self, defaults={**self.defaults, **defaults})

    def parameters(self) -> Iterable[inspect.Parameter]:
        known = {f.name: f.default for f in fields(self.make)} | dict(self.defaults)  # type: ignore[arg-type]
        return (flag.parameter(known[flag.field]) for flag in self.flags)


LOAD = FlagGroup(
    "load",
    LoadOptions,
    (
        Flag("threads", int, "Threads that compute; 0: one per available core.", "T"),
        Flag("ctx", int, "Longest text in tokens; 0: the model's limit, at most 4096.", "N"),
        Flag("expert_cache", str, "Experts kept in memory: N per layer on average, a size, or auto.", "N|SIZE|auto"),
        Flag("memory_budget", str, "Memory that everything together may take.", "SIZE|auto"),
        Flag("activations", str, "int8, or float32: slower, exact to rounding.", "int8|float32"),
        Flag("kv_cache", str, "Type of the keys and values kept.", "auto|f32|f16|q8_0"),
        Flag(
            "prefetch", bool, "Read the experts that the next layer will likely need ahead of time.",
            names=("--prefetch/--no-prefetch",),
        ),
        Flag(
            "preload", bool | None, "Read all cached experts at the start, or each when it is first needed "
            "(default: preload when all of them fit).", names=("--preload/--lazy",),
        ),
        Flag("eviction", str, "Which expert makes room for another.", "NAME"),
        Flag("io", str, "How experts are read from disk.", "direct|buffered|auto"),
        Flag("batch_size", int, "Most prompt tokens per step; 0: as many as the budget allows.", "N"),
        Flag("gpu_layers", int, "Layers on the GPU, counted from the output end.", "K"),
        Flag("vram_budget", str, "GPU memory that may be taken.", "SIZE|auto"),
        Flag("placement", str, "Where operators run, such as attn=gpu,experts=cpu.", "SPEC"),
    ),
)  # fmt: skip

SAMPLING = FlagGroup(
    "sampling",
    Sampling,
    (
        Flag("temperature", float, "0 always takes the likeliest token.", "F"),
        Flag("top_p", float, "Keep the likeliest tokens that hold this much probability.", "F"),
        Flag("top_k", int, "Keep the K likeliest tokens; 0: all.", "N"),
        Flag("min_p", float, "Keep tokens at least this probable, relative to the likeliest.", "F"),
        Flag("repeat_penalty", float, "Make recent tokens less likely; 1: do not.", "F"),
        Flag("repeat_last_n", int, "How many recent tokens the penalty looks at.", "N"),
        Flag("seed", int | None, "The same seed gives the same text (default: a fresh one).", "N"),
    ),
)

Model = Annotated[
    str, typer.Option("-m", "--model", metavar="MODEL", help="A GGUF file, safetensors directory, store, or demo.")
]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A GGUF file, safetensors directory, store, or demo.")
]
MaxTokens = Annotated[
    int, typer.Option("-n", "--max-tokens", metavar="N", help="Most tokens to generate.", parser=whole_number)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def takes(*groups: FlagGroup) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of `groups`; it receives each group's value under the group's parameter name."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        filled = {group.parameter for group in groups}
        own = [p for name, p in inspect.signature(command, eval_str=True).parameters.items() if name not in filled]
        shared = [p for group in groups for p in group.parameters()]

        def run(**values: Any) -> None:
            made = {g.parameter: g.make(**{f.field: values.pop(f.field) for f in g.flags}) for g in groups}
            command(**values, **made)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + shared
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate
