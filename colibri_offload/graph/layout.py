"""Where bytes lie in memory: packed matrices, float vectors and expert records. Sizes only, no data."""

from __future__ import annotations

from dataclasses import dataclass

from colibri_offload.jit.formats import ROWS, Format, get_format

LINE = 64
PAGE = 4096


def pad(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class MatrixLayout:
    """`batches` matrices [rows, cols] in the compute layout (jit/formats/base.py), one after another."""

    fmt: Format
    rows: int
    cols: int
    batches: int = 1

    @property
    def batch_nbytes(self) -> int:
        return self.fmt.matrix_nbytes(self.rows, self.cols)

    @property
    def nbytes(self) -> int:
        return self.batches * self.batch_nbytes

    @property
    def groups(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def steps(self) -> int:
        return -(-self.cols // self.fmt.step)

    def to_json(self) -> dict[str, object]:
        return {"fmt": self.fmt.name, "rows": self.rows, "cols": self.cols, "batches": self.batches}

    @classmethod
    def from_json(cls, data: dict) -> MatrixLayout:
        return cls(get_format(data["fmt"]), int(data["rows"]), int(data["cols"]), int(data["batches"]))


@dataclass(frozen=True)
class VectorLayout:
    """float32 [size], padded with zeros to a multiple of 32 (kernels read whole groups of rows)."""

    size: int

    @property
    def nbytes(self) -> int:
        return 4 * pad(self.size, 32)

    def to_json(self) -> dict[str, object]:
        return {"vector": self.size}


Layout = MatrixLayout | VectorLayout


@dataclass(frozen=True)
class ExpertLayout:
    """One expert block: gate and up interleaved per 32 hidden units (gate 16, gate 16, up 16, up 16), down, biases.

    Biases are float32: gate, then up, each padded to the hidden blocks, then down padded to its row groups.
    """

    hidden: int
    intermediate: int
    gate: Format
    up: Format
    down: Format
    bias: bool = False

    @property
    def hidden_blocks(self) -> int:
        """Blocks of 32 hidden units."""
        return -(-self.intermediate // 32)

    @property
    def groups(self) -> int:
        """Row groups of the down matrix."""
        return -(-self.hidden // ROWS)

    @property
    def gate_group(self) -> int:
        return self.gate.group_nbytes(self.hidden)

    @property
    def up_group(self) -> int:
        return self.up.group_nbytes(self.hidden)

    @property
    def gate_steps(self) -> int:
        return -(-self.hidden // self.gate.step)

    @property
    def up_steps(self) -> int:
        return -(-self.hidden // self.up.step)

    @property
    def down_steps(self) -> int:
        return -(-self.intermediate // self.down.step)

    @property
    def down_at(self) -> int:
        return self.hidden_blocks * 2 * (self.gate_group + self.up_group)

    @property
    def bias_at(self) -> int:
        """Offset of the biases, −1 without."""
        return self.down_at + self.groups * self.down.group_nbytes(self.intermediate) if self.bias else -1

    @property
    def nbytes(self) -> int:
        end = self.down_at + self.groups * self.down.group_nbytes(self.intermediate)
        if self.bias:
            end += self.hidden_blocks * 256 + self.groups * LINE
        return end

    def to_json(self) -> dict[str, object]:
        return {
            "hidden": self.hidden, "intermediate": self.intermediate, "gate": self.gate.name, "up": self.up.name,
            "down": self.down.name, "bias": self.bias,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: dict) -> ExpertLayout:
        gate, up, down = (get_format(data[n]) for n in ("gate", "up", "down"))
        return cls(int(data["hidden"]), int(data["intermediate"]), gate, up, down, bool(data["bias"]))


def layout_from_json(data: dict) -> Layout | ExpertLayout:
    if "vector" in data:
        return VectorLayout(int(data["vector"]))
    return ExpertLayout.from_json(data) if "gate" in data else MatrixLayout.from_json(data)
