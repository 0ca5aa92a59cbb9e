"""The tensor types of ggml: how many elements share a block, and how many bytes a block takes.

Source: ggml.h (enum ggml_type) and ggml-common.h (block structs) of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from colibri_offload.checkpoint.files import shown
from colibri_offload.errors import UnsupportedError


@dataclass(frozen=True)
class GgmlType:
    """A row of n elements takes n // block_elements · block_nbytes bytes."""

    name: str
    block_elements: int
    block_nbytes: int

    @property
    def quantised(self) -> bool:
        return self.block_elements > 1


GGML_TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 36),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
}

# Ids that ggml once used in files and has since withdrawn.
WITHDRAWN = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


def ggml_type(type_id: int, path: Path, tensor: str) -> GgmlType:
    """The type with this id; UnsupportedError naming file, tensor and id: unknown bytes are never guessed at."""
    found = GGML_TYPES.get(type_id)
    if found is None:
        old = WITHDRAWN.get(type_id)
        what = f"{type_id} ({old}, withdrawn by ggml)" if old else f"{type_id}, which is unknown"
        remedy = "use a file in Q4_0, Q4_K, Q6_K, Q8_0 or another current type"
        raise UnsupportedError(f"{path}: tensor {shown(tensor)} has ggml type {what}; {remedy}")
    return found
