"""Ridge regression that is fed row by row and solved in closed form."""

from __future__ import annotations

import numpy as np

_CHUNK = 64


class OnlineRidge:
    """Weights [X, Y] that minimise Σ (x·W − y)² + penalty·|W|² over the rows seen.

    `penalty` is relative to the mean square of x. Rows are collected and enter the Gram matrices (float64 [X, X] and
    [X, Y]) by chunks, as one product costs far less than many outer ones. Beyond `window` rows the past is halved, so
    that the fit follows a change of topic. Source: Hoerl & Kennard 1970, doi:10.1080/00401706.1970.10488634.
    """

    def __init__(self, inputs: int, outputs: int, penalty: float = 1e-3, window: int = 8192) -> None:
        self._penalty, self._window = penalty, window
        self._gram = np.zeros((inputs, inputs))
        self._cross = np.zeros((inputs, outputs))
        self._weight = 0
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []
        self._pending = 0

    def add(self, x: np.ndarray, y: np.ndarray) -> None:
        """x [T, X], y [T, Y], kept until the next chunk is full."""
        self._rows.append((x, y))
        self._pending += len(x)
        if self._pending >= _CHUNK:
            self._flush()

    def solve(self) -> np.ndarray:
        """float32 [X, Y] of all rows so far."""
        self._flush()
        size = len(self._gram)
        ridge = self._penalty * np.trace(self._gram) / size + np.finfo(np.float64).tiny
        return np.linalg.solve(self._gram + ridge * np.eye(size), self._cross).astype(np.float32)

    def _flush(self) -> None:
        if not self._rows:
            return
        x = np.concatenate([x for x, _ in self._rows]).astype(np.float64)
        y = np.concatenate([y for _, y in self._rows]).astype(np.float64)
        if self._weight > self._window:
            self._gram /= 2
            self._cross /= 2
            self._weight //= 2
        self._gram += x.T @ x
        self._cross += x.T @ y
        self._weight += len(x)
        self._rows.clear()
        self._pending = 0
