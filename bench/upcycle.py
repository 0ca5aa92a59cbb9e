"""Turn a dense Llama-like GGUF into a Mixture of Experts that says almost the same: sparse upcycling.

Every feed-forward layer becomes E copies of itself, each a little disturbed, behind a router that nobody trained: a
random projection. The weights of the chosen experts are renormalised, so they sum to 1, and the mixture of near-equal
experts is near the dense layer. What comes out reads as the original reads, while it routes, caches and streams as any
MoE: a real model with known answers, for benchmarks that would otherwise need tens of gigabytes.

    python bench/upcycle.py dense.gguf moe.gguf --experts 8 --top-k 2 --noise 1e-3

The file that is written is of GGUF architecture "llama" with experts (Mixtral's layout); its experts are F16,
everything else is copied bit for bit. Needs the package gguf (in the extra `test`).

Source: Komatsuzaki et al. 2022, Sparse Upcycling, arXiv:2212.05055.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

_FFN = ("ffn_gate", "ffn_up", "ffn_down")
_EXPERT_BYTES = 2  # F16


@dataclass(frozen=True)
class Upcycling:
    """`experts` copies per layer, `top_k` of them per token; `seed` fixes routers and noise.

    `noise`: the disturbance's standard deviation as a share of the matrix's own root mean square.
    """

    experts: int = 8
    top_k: int = 2
    noise: float = 1e-3
    seed: int = 0


def upcycle(source: Path, target: Path, how: Upcycling) -> None:
    """Write `target`, a MoE made of the dense model `source`. Holds one matrix's experts in memory at a time.

    Raises ValueError when `source` is not a dense model of architecture "llama" or `how` cannot be met.
    """
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    if arch != "llama" or "llama.expert_count" in reader.fields:
        raise ValueError(f"{source}: architecture {arch!r}; only dense models of architecture 'llama' can be upcycled")
    if not 1 <= how.top_k <= how.experts:
        raise ValueError(f"--top-k {how.top_k}: must be from 1 to --experts {how.experts}")
    writer = gguf.GGUFWriter(target, "llama")
    try:
        _copy_metadata(reader, writer)
        writer.add_expert_count(how.experts)
        writer.add_expert_used_count(how.top_k)
        for tensor in reader.tensors:
            _announce(writer, tensor, how)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        rng = np.random.default_rng(how.seed)
        for tensor in reader.tensors:
            for data in _tensors_of(tensor, how, rng):
                writer.write_tensor_data(data)
    finally:
        writer.close()


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue  # the writer counts for itself
        item = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=item)


def _is_ffn(name: str) -> bool:
    return name.split(".")[-2] in _FFN


def _router_name(name: str) -> str:
    return name.replace("ffn_gate.", "ffn_gate_inp.")


def _announce(writer: gguf.GGUFWriter, tensor: gguf.ReaderTensor, how: Upcycling) -> None:
    """Describe what `_tensors_of` will give for the tensor, in the same order."""
    if not _is_ffn(tensor.name):
        writer.add_tensor_info(
            tensor.name, tensor.data.shape, tensor.data.dtype, tensor.data.nbytes, raw_dtype=tensor.tensor_type
        )
        return
    cols, rows = (int(n) for n in tensor.shape)  # GGUF's order
    shape = (how.experts, rows, cols)
    writer.add_tensor_info(
        tensor.name.replace(".weight", "_exps.weight"), shape, np.dtype(np.float16), int(np.prod(shape)) * _EXPERT_BYTES
    )
    if "ffn_gate." in tensor.name:
        router = (how.experts, cols)
        writer.add_tensor_info(_router_name(tensor.name), router, np.dtype(np.float32), 4 * how.experts * cols)


def _tensors_of(tensor: gguf.ReaderTensor, how: Upcycling, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """What the tensor becomes: itself, or its experts [E, rows, cols], and with a gate the layer's router [E, cols]."""
    if not _is_ffn(tensor.name):
        yield tensor.data
        return
    dense = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    scale = how.noise * float(np.sqrt(np.mean(dense**2)))
    experts = np.empty((how.experts, *dense.shape), np.float16)
    for expert in experts:
        expert[:] = dense + scale * rng.standard_normal(dense.shape, np.float32)
    yield experts
    if "ffn_gate." in tensor.name:
        # Its input is normalised, so every logit has a standard deviation of about 1: all experts are used.
        cols = dense.shape[1]
        yield rng.standard_normal((how.experts, cols), np.float32) / np.float32(np.sqrt(cols))


def main() -> None:
    parser = argparse.ArgumentParser(description="Turn a dense Llama-like GGUF into a Mixture of Experts.")
    parser.add_argument("source", type=Path, help="a dense GGUF of architecture llama")
    parser.add_argument("target", type=Path, help="the GGUF to write")
    parser.add_argument("--experts", type=int, default=Upcycling.experts)
    parser.add_argument("--top-k", type=int, default=Upcycling.top_k)
    parser.add_argument("--noise", type=float, default=Upcycling.noise, help="relative to each matrix's RMS")
    parser.add_argument("--seed", type=int, default=Upcycling.seed)
    args = parser.parse_args()
    try:
        upcycle(args.source, args.target, Upcycling(args.experts, args.top_k, args.noise, args.seed))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
