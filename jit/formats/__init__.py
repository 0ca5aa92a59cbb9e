"""Weight formats by ggml's names."""

from __future__ import annotations

from colibri_offload.errors import UnsupportedError
from colibri_offload.jit.formats.base import COLUMNS, ROWS, Block, Format, Move, Part, QuantFormat
from colibri_offload.jit.formats.floats import BF16, F16, F32, FloatFormat
from colibri_offload.jit.formats.kquants import IQ4_XS, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from colibri_offload.jit.formats.legacy import IQ4_NL, MXFP4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
from colibri_offload.jit.formats.scaled import F8_E4M3, INT8, Q4_Z

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        F32(),
        F16(),
        BF16(),
        Q8_0(),
        Q4_0(),
        Q4_1(),
        Q5_0(),
        Q5_1(),
        Q2_K(),
        Q3_K(),
        Q4_K(),
        Q5_K(),
        Q6_K(),
        IQ4_NL(),
        IQ4_XS(),
        MXFP4(),
        INT8(),
        F8_E4M3(),
        Q4_Z(),
    )
}


def get_format(name: str) -> Format:
    """The format called `name`; UnsupportedError lists the known ones."""
    try:
        return FORMATS[name]
    except KeyError:
        raise UnsupportedError(f"no kernels for weight format {name!r}; supported: {', '.join(FORMATS)}") from None


__all__ = ["COLUMNS", "FORMATS", "ROWS", "Block", "FloatFormat", "Format", "Move", "Part", "QuantFormat", "get_format"]
