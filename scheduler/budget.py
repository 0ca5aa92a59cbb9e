"""The memory budget: one ledger in which every large allocation is booked before it is made."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from colibri_offload.errors import BudgetError, UsageError
from colibri_offload.scheduler.memory import format_size

_MIB = 1024**2
_LINES_SHOWN = 3


@dataclass(frozen=True)
class BudgetLine:
    """One row of the table that `colibri plan` prints."""

    name: str
    category: str
    nbytes: int


class Reservation:
    """Bytes booked in a budget, until release(). A context manager that releases."""

    def __init__(self, budget: MemoryBudget, line: BudgetLine) -> None:
        self._budget, self._line = budget, line

    @property
    def nbytes(self) -> int:
        return self._line.nbytes

    def resize(self, nbytes: int) -> None:
        """Raises: BudgetError when the growth does not fit; the old size then stays booked."""
        self._line = self._budget._book(self, BudgetLine(self._line.name, self._line.category, nbytes))

    def release(self) -> None:
        """Give the bytes back. Idempotent."""
        self._budget._strike(self)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class MemoryBudget:
    """A ledger of `total_bytes`, safe to use from several threads.

    Raises: UsageError when the total is not positive.
    """

    def __init__(self, total_bytes: int) -> None:
        if total_bytes <= 0:
            raise UsageError(f"--memory-budget: {total_bytes} bytes is no budget; give a size such as 8GiB")
        self.total_bytes = total_bytes
        self._lines: dict[Reservation, BudgetLine] = {}
        self._lock = threading.Lock()

    def reserve(self, name: str, nbytes: int, category: str) -> Reservation:
        """Book `nbytes` for `name`. `category` groups lines in the table: "weights", "kv_cache", "expert_cache" …

        Raises: BudgetError that says what is needed, what is left, who holds the rest and what to do.
        """
        line = BudgetLine(name, category, nbytes)
        reservation = Reservation(self, line)
        self._book(reservation, line)
        return reservation

    @property
    def remaining(self) -> int:
        """Bytes that are not booked."""
        with self._lock:
            return self.total_bytes - sum(line.nbytes for line in self._lines.values())

    def lines(self) -> tuple[BudgetLine, ...]:
        """What is booked now, in the order in which it was reserved."""
        with self._lock:
            return tuple(self._lines.values())

    def _book(self, reservation: Reservation, line: BudgetLine) -> BudgetLine:
        if line.nbytes < 0:
            raise ValueError(f"{line.name}: cannot reserve {line.nbytes} bytes")
        with self._lock:
            others = [other for held, other in self._lines.items() if held is not reservation]
            available = self.total_bytes - sum(other.nbytes for other in others)
            if line.nbytes > available:
                raise BudgetError(self._refusal(line, available, others))
            self._lines[reservation] = line
        return line

    def _strike(self, reservation: Reservation) -> None:
        with self._lock:
            self._lines.pop(reservation, None)

    def _refusal(self, line: BudgetLine, available: int, others: list[BudgetLine]) -> str:
        largest = sorted(others, key=lambda other: -other.nbytes)[:_LINES_SHOWN]
        held = ", ".join(f"{other.name} {format_size(other.nbytes)}" for other in largest) or "nothing"
        enough = -(-(self.total_bytes - available + line.nbytes) // _MIB)  # rounded up: the advice can be pasted
        return (
            f"{line.name}: needs {format_size(line.nbytes)} but {format_size(available)} of the memory budget of "
            f"{format_size(self.total_bytes)} is available (largest: {held}); "
            f"give --memory-budget {enough}MiB or more, lower --ctx or --expert-cache, or use a smaller quant"
        )
