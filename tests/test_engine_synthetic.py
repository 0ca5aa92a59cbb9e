"""bench/gen_moe.py writes models that load, route like trained ones, and are the same for the same shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from engine_util import GGUF, gen_moe

from colibri_offload import Engine

SHAPE = gen_moe.Shape(layers=2, experts=16, topk=4, hidden=256, ffn=256, heads=4, kv=2, hd=64, branch=0.1)


def dequantised(path: Path, name: str) -> np.ndarray:
    """float32, by the gguf package."""
    (tensor,) = (t for t in gguf.GGUFReader(path).tensors if t.name == name)
    return gguf.dequantize(tensor.data, tensor.tensor_type)


@pytest.mark.parametrize("kind", gen_moe.TYPES)
def test_weights_have_the_spread_and_the_constant_that_routing_needs(tmp_path: Path, kind: str) -> None:
    path = gen_moe.generate(tmp_path / "model.gguf", replace(SHAPE, type=kind))
    embedding = dequantised(path, "token_embd.weight")
    np.testing.assert_allclose(embedding[:, : gen_moe.CONSTANT_DIMS], 1.0, rtol=1e-3)
    assert embedding[:, gen_moe.CONSTANT_DIMS :].std() == pytest.approx(1.0, rel=0.05)
    for name, std in (("blk.1.ffn_up_exps.weight", 256**-0.5), ("blk.1.ffn_down_exps.weight", 0.1 * 256**-0.5)):
        weights = dequantised(path, name)
        assert abs(weights.mean()) < 0.02 * std
        assert weights[:, gen_moe.CONSTANT_DIMS :].std() == pytest.approx(std, rel=0.05)
    for name in ("blk.0.attn_output.weight", "blk.1.ffn_down_exps.weight"):
        assert not dequantised(path, name)[..., : gen_moe.CONSTANT_DIMS, :].any()


def busiest_quarter(path: Path) -> float:
    """Share of the picks that the busiest quarter of a layer's experts gets, averaged over layers."""
    ids = np.random.default_rng(0).integers(0, 256, 400).tolist()
    with Engine.load(path, memory_budget="2GiB") as engine, engine.record_routing() as routing:
        logits = engine.logits(ids)
    assert np.isfinite(logits).all() and logits.std() > 0.1
    counts = [np.sort(np.bincount(ids.ravel(), minlength=SHAPE.experts)) for ids in routing.topk_ids.values()]
    return float(np.mean([count[-SHAPE.experts // 4 :].sum() / count.sum() for count in counts]))


def test_skew_makes_experts_popular(tmp_path: Path) -> None:
    even = busiest_quarter(gen_moe.generate(tmp_path / "even.gguf", SHAPE))
    skewed = busiest_quarter(gen_moe.generate(tmp_path / "skewed.gguf", replace(SHAPE, skew=1.0)))
    assert even < 0.5 < skewed


def test_the_same_shape_gives_the_same_bytes(tmp_path: Path) -> None:
    one, two, other = (
        gen_moe.generate(tmp_path / f"{i}.gguf", replace(SHAPE, seed=seed)).read_bytes()
        for i, seed in enumerate((1, 1, 2))
    )
    assert one == two != other


def test_its_own_tokenizer_covers_every_byte_and_chats(tmp_path: Path) -> None:
    path = gen_moe.generate(tmp_path / "model.gguf", replace(SHAPE, vocab=300))
    text = "".join(map(chr, range(1, 0x250))) + " the 漢字 🐦"
    with Engine.load(path, memory_budget="2GiB") as engine:
        assert engine.spec.vocab == 300
        assert engine.tokenizer.decode(engine.tokenizer.encode(text)) == text
        chat = engine.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
        assert engine.tokenizer.decode(chat, skip_special=False).startswith("<|im_start|>user\nHi<|im_end|>")
        assert engine.tokenizer.encode("<|im_end|>", allow_special=True)[0] in engine.eos_ids


def test_a_tokenizer_can_be_copied(tmp_path: Path) -> None:
    source = GGUF / "qwen3_moe-Q4_0.gguf"
    path = gen_moe.generate(tmp_path / "model.gguf", SHAPE, tokenizer=source)
    with Engine.load(path, memory_budget="2GiB") as copy, Engine.load(source, memory_budget="2GiB") as original:
        text = "Once upon a time, <|im_start|> 3.14"
        for special in (False, True):
            ids = original.tokenizer.encode(text, allow_special=special)
            assert copy.tokenizer.encode(text, allow_special=special) == ids
        assert copy.tokenizer.eos_ids == original.tokenizer.eos_ids
        assert copy.tokenizer.chat_template == original.tokenizer.chat_template


@pytest.mark.parametrize(("change", "named"), [({"hidden": 100}, "hidden"), ({"topk": 17}, "topk")])
def test_an_impossible_shape_is_refused(change: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=f"--{named}"):
        replace(SHAPE, **change)
