"""Typed, bounded look-ups in a checkpoint's configuration: a broken value is named before anything is built from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from colibri_offload.errors import CheckpointError, UnsupportedError

# No published dimension comes near: what exceeds it is damage, and must not become an allocation.
MAX_DIM = 1 << 24


@dataclass(frozen=True)
class Config:
    """A config.json, or GGUF metadata turned into the same keys. A key that is null counts as absent.

    `origin` names the file in messages. Every look-up raises CheckpointError naming file, key and value.
    """

    values: Mapping[str, Any]
    origin: str

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, *keys: str, default: int | None = None, low: int = 1, high: int = MAX_DIM) -> int:
        """The first of `keys` that is present, a whole number in low..high."""
        key, value = self._first(keys, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._bad(key, value, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, *, low: float = 1e-30, high: float = 1e30) -> float:
        """A number in low..high; the default bounds keep it positive and its square finite."""
        _, value = self._first((key,), default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self._bad(key, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._bad(key, value, "true or false")
        return value

    def choice(self, key: str, default: str, known: Sequence[str]) -> str:
        """One of `known`; UnsupportedError listing them otherwise."""
        value = self.get(key, default)
        if value not in known:
            raise UnsupportedError(f"{self.origin}: {key} is {value!r}, supported are {', '.join(map(repr, known))}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers; () when absent."""
        value = self.get(key, [])
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise self._bad(key, value, "a list of whole numbers")
        return tuple(value)

    def section(self, key: str) -> Config | None:
        """A nested object, None when absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._bad(key, value, "an object")
        return Config(value, f"{self.origin}: {key}")

    def refuse(self, key: str, harmless: Any) -> None:
        """UnsupportedError unless `key` is absent or has the one value that changes nothing."""
        value = self.get(key, harmless)
        if value != harmless:
            raise UnsupportedError(f"{self.origin}: {key} is {value!r}; only {harmless!r} is supported for this family")

    def _first(self, keys: Sequence[str], default: Any) -> tuple[str, Any]:
        for key in keys:
            if self.values.get(key) is not None:
                return key, self.values[key]
        if default is None:
            raise CheckpointError(f"{self.origin}: key {keys[0]!r} is missing; fetch the complete configuration again")
        return keys[0], default

    def _bad(self, key: str, value: Any, wanted: str) -> CheckpointError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return CheckpointError(f"{self.origin}: {key} is {shown}, not {wanted}; fetch the configuration again")
