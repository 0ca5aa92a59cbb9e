"""Writes a checkpoint as a store: plan, then every resident tensor, then every expert, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from colibri_offload.checkpoint.base import Tensor
from colibri_offload.convert.plan import Plan, make_plan
from colibri_offload.convert.provenance import provenance, today
from colibri_offload.convert.quants import get_quant
from colibri_offload.convert.rows import RowReader, make_packer
from colibri_offload.convert.side_files import config_files, describe, side_files
from colibri_offload.errors import TextError, UnsupportedError, UsageError
from colibri_offload.families.spec_json import spec_to_json
from colibri_offload.graph.layout import ExpertLayout, MatrixLayout
from colibri_offload.graph.packer import Packer, aligned
from colibri_offload.graph.source import CheckpointSource, StoreSource
from colibri_offload.models import TokenizerLoader, open_model
from colibri_offload.storage.base import ExpertKey
from colibri_offload.storage.publish import write_durably
from colibri_offload.storage.writer import StoreWriter

Progress = Callable[[str, int, int], None]  # what, done bytes, total bytes
PIECE_NBYTES, LOW_MEMORY_PIECE_NBYTES = 256 << 20, 16 << 20  # of a tensor as float32


@dataclass(frozen=True)
class Conversion:
    """A finished conversion. `warning`: what the store lacks, in one line, or ""."""

    path: Path
    nbytes: int
    warning: str


def convert(
    model: str | Path,
    output: str | Path,
    quant: str = "q8_0",
    *,
    store: Literal["file", "lmdb"] = "file",
    resume: bool = False,
    overwrite: bool = False,
    low_memory: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write the GGUF or safetensors model as a store at `output`, which appears there only when it is whole.

    Memory: the largest resident tensor or expert block, and one piece of it as float32 (256 MiB; 16 MiB with
    `low_memory`). An interrupted conversion stays beside the output and is continued with resume=True.
    A model without a usable tokenizer is converted without one; the result's `warning` says so.
    Raises: UsageError for arguments, CheckpointError or UnsupportedError for the source, StoreError for the output.
    """
    rule = get_quant(quant)
    packer = make_packer()
    source, load_tokenizer = open_model(model, packer)
    with closing(source):
        if not isinstance(source, CheckpointSource):
            raise UsageError(f"--input {model}: is a converted store already; give the original GGUF or safetensors")
        reader = RowReader(packer, LOW_MEMORY_PIECE_NBYTES if low_memory else PIECE_NBYTES)
        plan = make_plan(source, rule, reader)
        files, warning = _side_files(source, load_tokenizer)
        origin = provenance(source.checkpoint, quant)
        identity = {
            "layout_version": StoreSource.LAYOUT_VERSION,
            "spec": spec_to_json(source.spec),
            "experts": {str(layer): layout.to_json() for layer, layout in plan.experts.items()},
            "residents": {name: layout.to_json() for name, layout in plan.residents.items()},
            "provenance": origin,
            "files": describe(files),
        }
        description = {key: value for key, value in identity.items() if key != "residents"}
        description["provenance"] = {**origin, "date": today()}
        with StoreWriter(
            output, store, model=description, identity=identity, expected_bytes=plan.disk_nbytes, resume=resume,
            overwrite=overwrite,
        ) as writer:  # fmt: skip
            _Writing(source, plan, packer, reader, writer, progress or (lambda what, done, total: None)).run()
            for name, data in files.items():
                write_durably(writer.partial / name, data)
            return Conversion(writer.finish(), plan.nbytes, warning)


def _side_files(source: CheckpointSource, load_tokenizer: TokenizerLoader) -> tuple[dict[str, bytes], str]:
    try:
        return side_files(source.checkpoint, load_tokenizer), ""
    except (TextError, UnsupportedError) as error:
        return config_files(source.checkpoint), f"the store has no tokenizer, it takes token ids only: {error}"


class _Writing:
    def __init__(
        self, source: CheckpointSource, plan: Plan, packer: Packer, reader: RowReader, writer: StoreWriter,
        progress: Progress,
    ):  # fmt: skip
        self._source, self._plan, self._packer, self._reader = source, plan, packer, reader
        self._writer, self._progress = writer, progress
        self._done, self._total = 0, plan.nbytes

    def run(self) -> None:
        for name, layout in self._plan.residents.items():
            if not self._writer.has_resident(name):
                self._writer.add_resident(name, self._resident(name), layout.to_json())
            self._advance("resident weights", layout.nbytes)
        for key in self._plan.keys:
            layout = self._plan.experts[key.layer]
            if not self._writer.has_expert(key):
                self._writer.add_expert(key, self._expert(key, layout))
            self._advance("experts", layout.nbytes)

    def _advance(self, what: str, nbytes: int) -> None:
        self._done += nbytes
        self._progress(what, self._done, self._total)

    def _resident(self, name: str) -> np.ndarray:
        layout = self._plan.residents[name]
        if isinstance(layout, ExpertLayout):
            return self._record(self._plan.records[name], layout)
        out = aligned(layout.nbytes)
        if isinstance(layout, MatrixLayout):
            self._matrix(self._plan.tensors[name], layout, out.ctypes.data)
        else:
            self._source.load_resident(name, out.ctypes.data)
        return out

    def _matrix(self, tensor: Tensor, layout: MatrixLayout, dst: int) -> None:
        """Pieces are whole groups of rows, so each has its own place in the layout."""
        pieces = self._reader.converted(tensor, layout.fmt.name)
        if layout.batches > 1:
            self._packer.matrix(layout, np.concatenate(list(pieces)), dst)
            return
        for rows in pieces:
            part = MatrixLayout(layout.fmt, len(rows), layout.cols)
            self._packer.matrix(part, rows, dst)
            dst += part.nbytes

    def _expert(self, key: ExpertKey, layout: ExpertLayout) -> np.ndarray:
        return self._record(self._source.parts(key), layout)

    def _record(self, tensors: Mapping[str, Tensor], layout: ExpertLayout) -> np.ndarray:
        formats = {"gate": layout.gate.name, "up": layout.up.name, "down": layout.down.name}
        parts = {
            part: np.concatenate(list(self._pieces(tensor, formats.get(part)))) for part, tensor in tensors.items()
        }
        out = aligned(layout.nbytes)
        self._packer.expert(layout, parts, out.data)
        return out

    def _pieces(self, tensor: Tensor, fmt: str | None) -> Iterator[np.ndarray]:
        """Rows in the format, or for a bias (None) its float32 values."""
        if fmt is not None:
            return self._reader.converted(tensor, fmt)
        return (values.reshape(-1) for values in self._reader.values(tensor))
