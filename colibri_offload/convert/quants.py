"""What `--quant` names mean: which format each matrix gets. A new quant is one line in QUANTS.

Vectors (norms, biases, sinks) are no matrices: they are float32 in every model, as in graph/source.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from colibri_offload.errors import UsageError
from colibri_offload.jit.formats import get_format

# A routing decision or a gate hangs on these few numbers.
ALWAYS_F32 = ("router", "shared_gate")
# What a matrix becomes whose columns do not fill whole blocks; F32 when its values leave the range of F16.
FALLBACK, WIDE = "F16", "F32"
# The largest value that a format's 16-bit scale can express. Formats that are absent reach as far as float32.
LARGEST = {"F16": 65504.0, "Q8_0": 65504.0 * 127, "Q4_0": 65504.0 * 8}


@dataclass(frozen=True)
class Quant:
    """`matrices`: the format of every matrix, None: as it is. `slots`: the slots that get another one."""

    about: str
    matrices: str | None
    slots: Mapping[str, str] = field(default_factory=dict)

    def format(self, slot: str, columns: int, found: str) -> str:
        """Format of the matrix of `slot`, which the checkpoint holds in format `found`."""
        if slot in ALWAYS_F32:
            return "F32"
        if self.matrices is None:
            return found
        wanted = self.slots.get(slot, self.matrices)
        return wanted if columns % get_format(wanted).block_elements == 0 else FALLBACK


# Embedding and head meet every token, and MLA's k_b and v_b expand a latent that many heads share: 4 bits hurt there.
_SENSITIVE = {slot: "Q8_0" for slot in ("embed", "head", "k_b", "v_b")}

QUANTS: Mapping[str, Quant] = {
    "keep": Quant("formats as they are", None),
    "f32": Quant("32-bit floats", "F32"),
    "bf16": Quant("16-bit floats with the range of float32", "BF16"),
    "f16": Quant("16-bit floats", "F16"),
    "q8_0": Quant("8 bits and a scale per 32 weights", "Q8_0"),
    "q4_0": Quant("4 bits and a scale per 32 weights; embedding, head and MLA's k_b, v_b in q8_0", "Q4_0", _SENSITIVE),
}


def get_quant(name: str) -> Quant:
    """The quant called `name`; UsageError lists the known ones."""
    try:
        return QUANTS[name]
    except KeyError:
        raise UsageError(f"--quant {name}: unknown; choose one of {', '.join(QUANTS)}") from None
