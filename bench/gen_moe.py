"""Writes a synthetic Qwen3-MoE GGUF of any size: random quantised weights, real routing, no download.

    python bench/gen_moe.py OUT.gguf --type Q4_0 --layers 16 --experts 64 [--branch 0.1 --skew 0.6 --tok REAL.gguf]

Random weights alone do not route like a trained model: deep layers collapse onto a quarter of the experts. `branch`
scales what every layer adds to the residual stream; at 0.1 the stream stays that of the token, and routing is near
uniform. `skew` adds −skew·ln(rank) to the router's logits, with ranks permuted in each layer: popular experts, as in
real models (0.6 gives a quarter of the experts 63 % of the picks). The bias needs an input that is the same for every
token: the first 32 dimensions of the residual stream hold a constant, because every embedding does and
the rows that would add to it (attention output, expert down) have scale 0.

Memory: one tensor at a time (the largest is all experts' gate of one layer).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, TokenType

CONSTANT_DIMS = 32
TYPES = ("Q4_0", "Q4_K", "Q8_0")
_FILE_TYPES = {
    "Q4_0": LlamaFileType.MOSTLY_Q4_0, "Q4_K": LlamaFileType.MOSTLY_Q4_K_M, "Q8_0": LlamaFileType.MOSTLY_Q8_0,
}  # fmt: skip
# Standard deviation of a block of random bytes whose scale is 1; for Q4_K with a minimum scale of 7.5.
_SPREAD = {"Q4_0": 4.61, "Q8_0": 73.9, "Q4_K": 260.0}
_Q4_K_MINIMUM = 7.5
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """What to write. Q4_K needs `hidden` and `ffn` to be multiples of 256, the others of 32."""

    type: str = "Q4_0"
    layers: int = 16
    experts: int = 64
    topk: int = 8
    hidden: int = 2048
    ffn: int = 768
    heads: int = 32
    kv: int = 4
    hd: int = 128
    seed: int = 1
    branch: float = 1.0
    skew: float = 0.0
    vocab: int = 0

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise ValueError(f"--type {self.type}: choose one of {', '.join(TYPES)}")
        block = self.block_elements
        for name in ("hidden", "ffn"):
            if getattr(self, name) % block:
                raise ValueError(f"--{name} {getattr(self, name)}: {self.type} needs a multiple of {block}")
        if not 1 <= self.topk <= self.experts:
            raise ValueError(f"--topk {self.topk}: must be from 1 to the number of experts, {self.experts}")

    @property
    def block_elements(self) -> int:
        return gguf.GGML_QUANT_SIZES[GGMLQuantizationType[self.type]][0]

    @property
    def block_nbytes(self) -> int:
        return gguf.GGML_QUANT_SIZES[GGMLQuantizationType[self.type]][1]


def generate(path: str | Path, shape: Shape, tokenizer: str | Path | None = None) -> Path:
    """Write the model. `tokenizer`: a GGUF whose tokenizer is copied; else a byte-level one is made, of at least
    shape.vocab tokens. The same shape gives the same bytes."""
    writer = GGUFWriter(path, "qwen3moe")
    vocab = _copy_tokenizer(writer, tokenizer) if tokenizer else _make_tokenizer(writer, shape.vocab)
    _add_facts(writer, shape, vocab)
    tensors = _Tensors(writer, shape)
    _declare(tensors, replace(shape, vocab=vocab))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for make in tensors.makers:
        writer.write_tensor_data(make())
    writer.close()
    return Path(path)


def _add_facts(w: GGUFWriter, s: Shape, vocab: int) -> None:
    w.add_name(f"synthetic-qwen3moe-L{s.layers}-E{s.experts}-{s.type}")
    w.add_block_count(s.layers)
    w.add_context_length(32768)
    w.add_embedding_length(s.hidden)
    w.add_feed_forward_length(s.ffn)
    w.add_head_count(s.heads)
    w.add_head_count_kv(s.kv)
    w.add_key_length(s.hd)
    w.add_value_length(s.hd)
    w.add_rope_freq_base(1e6)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_expert_count(s.experts)
    w.add_expert_used_count(s.topk)
    w.add_expert_feed_forward_length(s.ffn)
    w.add_vocab_size(vocab)
    w.add_file_type(_FILE_TYPES[s.type])
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)


class _Tensors:
    """Declares tensors to the writer and remembers how to make each when its turn comes."""

    def __init__(self, writer: GGUFWriter, shape: Shape) -> None:
        self.makers: list[Callable[[], np.ndarray]] = []
        self._writer, self._shape = writer, shape
        self._random = np.random.Generator(np.random.SFC64(shape.seed))

    def quantised(self, name: str, dims: tuple[int, ...], std: float, **special: bool) -> None:
        """Weights of dims [..., rows, cols], mean 0; `special` as for _blocks."""
        s, nblocks = self._shape, math.prod(dims) // self._shape.block_elements
        raw_dims = (*dims[:-1], dims[-1] // s.block_elements * s.block_nbytes)
        self._writer.add_tensor_info(
            name, raw_dims, np.dtype(np.uint8), nblocks * s.block_nbytes, raw_dtype=GGMLQuantizationType[s.type]
        )
        self.makers.append(lambda: self._blocks(dims, std, **special).reshape(raw_dims))

    def float32(self, name: str, dims: tuple[int, ...], make: Callable[[tuple[int, ...]], np.ndarray]) -> None:
        self._writer.add_tensor_info(name, dims, np.dtype(np.float32), 4 * math.prod(dims))
        self.makers.append(lambda: make(dims))

    def ones(self, name: str, size: int) -> None:
        self.float32(name, (size,), lambda dims: np.ones(dims, np.float32))

    def router(self, dims: tuple[int, ...]) -> np.ndarray:
        """[E, H]: column group 0 meets the constant, so it is the bias."""
        experts, hidden = dims
        weights = self._random.standard_normal(dims, dtype=np.float32) / np.float32(hidden**0.5)
        bias = -self._shape.skew * np.log(np.arange(1, experts + 1))
        weights[:, :CONSTANT_DIMS] = (self._random.permutation(bias - bias.mean()) / CONSTANT_DIMS)[:, None]
        return weights

    def _blocks(
        self, dims: tuple[int, ...], std: float, keep_constant: bool = False, constant: bool = False
    ) -> np.ndarray:
        """uint8 [matrices, rows, blocks, block_nbytes]. `keep_constant`: the first rows give 0. `constant`: each row
        starts with `std` in its first dimensions."""
        s, kind = self._shape, self._shape.type
        rows, cols = dims[-2:]
        count = math.prod(dims) // s.block_elements
        raw = np.frombuffer(bytearray(self._random.bytes(count * s.block_nbytes)), np.uint8)
        blocks = raw.reshape(-1, rows, cols // s.block_elements, s.block_nbytes)
        # bytes are not centred on 0: a random sign of the scale makes the mean 0
        scale = (np.where(blocks[..., -1] & 1, 1.0, -1.0) * (std / _SPREAD[kind])).astype(np.float16)
        if keep_constant:
            scale[:, :CONSTANT_DIMS] = 0
        blocks[..., 0:2] = scale[..., None].view(np.uint8)
        if kind == "Q4_K":
            minimum = (scale.astype(np.float32) * _Q4_K_MINIMUM).astype(np.float16)
            blocks[..., 2:4] = minimum[..., None].view(np.uint8)
        if constant:
            _set_constant(blocks[:, :, 0], kind, std)
        return blocks


def _set_constant(blocks: np.ndarray, kind: str, value: float) -> None:
    """Make the first 32 elements of every block (uint8 [..., block_nbytes]) equal to `value`."""

    def half(x: float) -> np.ndarray:
        return np.frombuffer(np.float16(x).tobytes(), np.uint8)

    if kind == "Q4_0":
        blocks[..., 0:2], blocks[..., 2:] = half(value / 7), 0xFF
    elif kind == "Q8_0":
        blocks[..., 0:2], blocks[..., 2:] = half(value / 100), 100
    else:  # sub-block 0: scale 17 in byte 4, minimum 0 in byte 8, values 15 in the low nibbles of the first 32 bytes
        blocks[..., 0:2], blocks[..., 2:4] = half(value / (17 * 15)), half(value / (17 * 15) * _Q4_K_MINIMUM)
        blocks[..., 4] = blocks[..., 4] & 0xC0 | 17
        blocks[..., 8] &= 0xC0
        blocks[..., 16:48] |= 0x0F


def _declare(t: _Tensors, s: Shape) -> None:
    q_dim, kv_dim, narrow = s.heads * s.hd, s.kv * s.hd, s.hidden**-0.5
    t.quantised("token_embd.weight", (s.vocab, s.hidden), 1.0, constant=True)
    t.ones("output_norm.weight", s.hidden)
    t.quantised("output.weight", (s.vocab, s.hidden), narrow)
    for i in range(s.layers):
        n = f"blk.{i}."
        t.ones(n + "attn_norm.weight", s.hidden)
        t.quantised(n + "attn_q.weight", (q_dim, s.hidden), narrow)
        t.quantised(n + "attn_k.weight", (kv_dim, s.hidden), narrow)
        t.quantised(n + "attn_v.weight", (kv_dim, s.hidden), narrow)
        t.quantised(n + "attn_output.weight", (s.hidden, q_dim), s.branch * q_dim**-0.5, keep_constant=True)
        t.ones(n + "attn_q_norm.weight", s.hd)
        t.ones(n + "attn_k_norm.weight", s.hd)
        t.ones(n + "ffn_norm.weight", s.hidden)
        t.float32(n + "ffn_gate_inp.weight", (s.experts, s.hidden), t.router)
        t.quantised(n + "ffn_gate_exps.weight", (s.experts, s.ffn, s.hidden), narrow)
        t.quantised(
            n + "ffn_down_exps.weight", (s.experts, s.hidden, s.ffn), s.branch * s.ffn**-0.5, keep_constant=True
        )
        t.quantised(n + "ffn_up_exps.weight", (s.experts, s.ffn, s.hidden), narrow)


def _copy_tokenizer(w: GGUFWriter, source: str | Path) -> int:
    """Every tokenizer key of another GGUF. Returns the vocabulary's size."""
    reader = GGUFReader(source)
    for key, field in reader.fields.items():
        if key.startswith("tokenizer."):
            value: Any = field.contents()
            if isinstance(value, list):
                w.add_array(key, value)
            else:
                w.add_key_value(key, value, field.types[0])
    return len(reader.fields["tokenizer.ggml.tokens"].data)


def _make_tokenizer(w: GGUFWriter, least: int) -> int:
    """A byte-level BPE: 256 bytes, one merge, ChatML's control tokens, padding up to `least` tokens."""
    tokens = [*_byte_letters(), "Ġt"]
    types = [TokenType.NORMAL] * len(tokens)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    ids = {token: len(tokens) + i for i, token in enumerate(control)}
    tokens += control
    types += [TokenType.CONTROL] * len(control)
    padding = [f"<|unused_{i}|>" for i in range(max(0, least - len(tokens)))]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(tokens + padding)
    w.add_token_types(types + [TokenType.UNUSED] * len(padding))
    w.add_token_merges(["Ġ t"])
    w.add_eos_token_id(ids["<|im_end|>"])
    w.add_pad_token_id(ids["<|endoftext|>"])
    w.add_add_bos_token(False)
    w.add_chat_template(_CHATML)
    return len(tokens) + len(padding)


def _byte_letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each byte. Source: GPT-2's encoder.py, bytes_to_unicode."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tok", type=Path, help="a GGUF whose tokenizer is copied; default: a byte-level one is made")
    for field in fields(Shape):
        choices = TYPES if field.name == "type" else None
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default, choices=choices)
    args = vars(parser.parse_args())
    out, tok = args.pop("out"), args.pop("tok")
    try:
        shape = Shape(**args)
    except ValueError as error:
        parser.error(str(error))
    generate(out, shape, tok)
    print(f"{out}: {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
