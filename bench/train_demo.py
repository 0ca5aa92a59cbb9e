"""Train the bundled demo model from scratch: a small Qwen3-MoE on free texts, written in the Hugging Face layout.

    python bench/train_demo.py OUT --minutes 80 --threads 2
    colibri convert --input OUT --output demo --quant q8_0

Needs torch, which is no dependency of this project (`pip install torch`), and three corpora from Debian packages, three
domains so that the router has something to tell apart:
- the King James Bible: bible-kjv with bible-kjv-text (public domain);
- the sources of the Python 3.11 documentation: python3.11-doc (PSF licence);
- the standard library's top-level modules, from the running interpreter (PSF licence).

21 M weights; about 80 minutes on two cores give held-out losses near 2.5 (Bible), 3.2 (documentation) and 2.95 (code)
nats per token. The budget is wall-clock time, so two runs end at different steps and differ in their weights.

Axis letters: B sequences, T tokens, H hidden, N heads, G kv heads, D head dim, E experts, K experts per token, I width.
Sources: Qwen3, arXiv:2505.09388; the balance loss: Fedus et al. 2021 (Switch Transformer), arXiv:2101.03961, eq. 4.
"""

from __future__ import annotations

import argparse
import glob
import gzip
import json
import math
import os
import random
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 4096, 256, 6, 8, 2, 32
EXPERTS, TOP_K, WIDTH = 32, 4, 128
THETA, EPS, MAX_POSITIONS = 10000.0, 1e-6, 1024
SEQUENCE, BATCH = 256, 24
LEARNING_RATE, WARMUP_STEPS, LAST_LR_SHARE, BALANCE_WEIGHT = 2e-3, 100, 0.05, 0.01
END_OF_TEXT = "<|endoftext|>"
HELD_OUT, EVAL_SEQUENCES = 20_000, 16
LOG_STEPS, SAVE_STEPS = 20, 300
MIX = {"bible": 0.45, "docs": 0.35, "code": 0.2}  # share of training sequences
MAX_TOKENS = {"bible": None, "docs": 3_000_000, "code": 2_500_000}


# --- text ---


def read_corpus() -> dict[str, list[str]]:
    """Domain → documents. The Bible comes in pieces of 40 lines."""
    bible = subprocess.run(["bible", "-f", "Gen1:1-Rev22:21"], capture_output=True, text=True, check=True).stdout
    lines = bible.splitlines()
    docs = []
    for path in sorted(glob.glob("/usr/share/doc/python3.11/html/_sources/**/*.txt*", recursive=True)):
        opener = gzip.open if path.endswith(".gz") else open
        with opener(path, "rt", errors="ignore") as f:
            docs.append(f.read())
    modules = sorted(Path(os.__file__).parent.glob("*.py"))
    return {
        "bible": ["\n".join(lines[i : i + 40]) for i in range(0, len(lines), 40)],
        "docs": docs,
        "code": [path.read_text(errors="ignore") for path in modules],
    }


def make_tokenizer(path: Path, corpus: dict[str, list[str]]) -> Tokenizer:
    """The byte-level BPE at `path`, trained on a part of the corpus when it is not there yet."""
    if not path.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(corpus["bible"] + corpus["docs"][::2] + corpus["code"][::4], trainer)
        tokenizer.save(str(path))
    return Tokenizer.from_file(str(path))


def tokenise(tokenizer: Tokenizer, texts: list[str], limit: int | None) -> np.ndarray:
    """int32 ids of all texts in a shuffled but fixed order, each after an end-of-text token (id 0)."""
    random.Random(1).shuffle(texts)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids += [0, *encoding.ids]
    return np.array(ids, dtype=np.int32)[:limit]


# --- model ---


class RmsNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, EPS)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE on [B, heads, T, D], pairs (i, i + D/2)."""
    inv_freq = 1.0 / THETA ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angle = positions[:, None].float() * inv_freq
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.post_norm = RmsNorm(HIDDEN), RmsNorm(HIDDEN)
        self.q_norm, self.k_norm = RmsNorm(HEAD_DIM), RmsNorm(HEAD_DIM)
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM, False)
        self.k = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, False)
        self.v = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, False)
        self.o = nn.Linear(HEADS * HEAD_DIM, HIDDEN, False)
        self.router = nn.Linear(HIDDEN, EXPERTS, False)
        self.gate = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * HIDDEN**-0.5)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * WIDTH**-0.5 / math.sqrt(2 * LAYERS))

    def attention(self, h: Tensor) -> Tensor:
        """Causal grouped-query attention with q and k normalised per head; [B, T, H] → the same."""
        b, t, _ = h.shape
        positions = torch.arange(t)
        q = rotate(self.q_norm(self.q(h).view(b, t, HEADS, HEAD_DIM)).transpose(1, 2), positions)
        k = rotate(self.k_norm(self.k(h).view(b, t, KV_HEADS, HEAD_DIM)).transpose(1, 2), positions)
        v = self.v(h).view(b, t, KV_HEADS, HEAD_DIM).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(b, t, HEADS * HEAD_DIM))

    def experts(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, H] → the weighted sum of each token's experts, and the balance loss."""
        p = F.softmax(self.router(h).float(), -1)
        weights, ids = p.topk(TOP_K, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = ids.reshape(-1)
        share = torch.zeros(EXPERTS).scatter_add_(0, flat, torch.ones(flat.numel())) / flat.numel()
        balance = EXPERTS * (share * p.mean(0)).sum()
        # Tokens sorted by expert, so that each expert is one product.
        order = flat.argsort(stable=True)
        token, counts = order // TOP_K, torch.bincount(flat, minlength=EXPERTS).tolist()
        parts, outputs = zip(h[token].split(counts), weights.reshape(-1)[order].split(counts), strict=True), []
        for e, (x, weight) in enumerate(parts):
            if counts[e]:
                y = F.silu(x @ self.gate[e].T.to(x.dtype)) * (x @ self.up[e].T.to(x.dtype))
                outputs.append((y @ self.down[e].T.to(y.dtype)) * weight[:, None].to(y.dtype))
        return torch.zeros_like(h).index_add(0, token, torch.cat(outputs).to(h.dtype)), balance

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.input_norm(x))
        y, balance = self.experts(self.post_norm(x).view(-1, HIDDEN))
        return x + y.view(x.shape), balance


class LanguageModel(nn.Module):
    """ids [B, T] → logits [B, T, V] and the mean balance loss. The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = RmsNorm(HIDDEN)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        h, balance = self.embed(ids), torch.zeros(())
        for layer in self.layers:
            h, one = layer(h)
            balance = balance + one
        return F.linear(self.norm(h), self.embed.weight), balance / LAYERS


# --- saving ---


def tensors(model: LanguageModel) -> dict[str, Tensor]:
    """The hub's names → weights in bf16."""
    out = {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm.weight}
    for n, layer in enumerate(model.layers):
        p = f"model.layers.{n}."
        out[p + "input_layernorm.weight"] = layer.input_norm.weight
        out[p + "post_attention_layernorm.weight"] = layer.post_norm.weight
        for name in ("q_norm", "k_norm"):
            out[f"{p}self_attn.{name}.weight"] = getattr(layer, name).weight
        for name in ("q", "k", "v", "o"):
            out[f"{p}self_attn.{name}_proj.weight"] = getattr(layer, name).weight
        out[p + "mlp.gate.weight"] = layer.router.weight
        for e in range(EXPERTS):
            for name in ("gate", "up", "down"):
                out[f"{p}mlp.experts.{e}.{name}_proj.weight"] = getattr(layer, name)[e]
    return {name: t.detach().to(torch.bfloat16).contiguous().clone() for name, t in out.items()}


CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": WIDTH,
    "intermediate_size": WIDTH,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_sliding_window": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "model_max_length": MAX_POSITIONS,
}


def save(model: LanguageModel, out: Path) -> None:
    save_file(tensors(model), out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(CONFIG, indent=1))
    (out / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=1))


# --- training ---


@dataclass(frozen=True)
class Data:
    """Domain → int32 token ids, to train on and held out."""

    train: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]


def load_data(out: Path) -> Data:
    corpus = read_corpus()
    print("MB", [sum(map(len, texts)) / 1e6 for texts in corpus.values()], flush=True)
    tokenizer = make_tokenizer(out / "tokenizer.json", corpus)
    ids = {name: tokenise(tokenizer, texts, MAX_TOKENS[name]) for name, texts in corpus.items()}
    data = Data({n: x[:-HELD_OUT] for n, x in ids.items()}, {n: x[-HELD_OUT:] for n, x in ids.items()})
    print("tokens", {name: len(x) for name, x in data.train.items()}, flush=True)
    return data


def draw_batch(data: Data) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 [B, T] each."""
    rows = []
    for name in np.random.choice(list(MIX), BATCH, p=np.array(list(MIX.values()))):
        start = np.random.randint(0, len(data.train[name]) - SEQUENCE - 1)
        rows.append(data.train[name][start : start + SEQUENCE + 1])
    x = torch.from_numpy(np.stack(rows)).long()
    return x[:, :-1], x[:, 1:]


def loss_of(model: LanguageModel, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy in nats per token, and the balance loss."""
    with torch.autocast("cpu", torch.bfloat16):
        logits, balance = model(x)
    return F.cross_entropy(logits.float().view(-1, VOCAB), y.reshape(-1)), balance


@torch.no_grad()
def evaluate(model: LanguageModel, data: Data) -> dict[str, float]:
    """Domain → held-out loss in nats per token."""
    model.eval()
    losses = {}
    for name, ids in data.held_out.items():
        x = torch.from_numpy(ids[: EVAL_SEQUENCES * SEQUENCE + 1]).long()
        inputs, targets = x[:-1].view(EVAL_SEQUENCES, SEQUENCE), x[1:].view(EVAL_SEQUENCES, SEQUENCE)
        losses[name] = round(loss_of(model, inputs, targets)[0].item(), 3)
    model.train()
    return losses


def make_optimizer(model: LanguageModel) -> torch.optim.AdamW:
    """AdamW; norms do not decay."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, progress: float) -> float:
    """Linear warm-up by step, cosine decay by the share of the time that is gone."""
    decay = LAST_LR_SHARE + (1 - LAST_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))
    return LEARNING_RATE * min(1, step / WARMUP_STEPS) * decay


def train(model: LanguageModel, data: Data, out: Path, seconds: float) -> None:
    optimizer, start, step = make_optimizer(model), time.time(), 0
    while (elapsed := time.time() - start) < seconds:
        rate = learning_rate(step, elapsed / seconds)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, balance = loss_of(model, *draw_batch(data))
        (loss + BALANCE_WEIGHT * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % LOG_STEPS == 0:
            speed = step * BATCH * SEQUENCE / elapsed
            print(
                f"{step} {elapsed:.0f}s loss {loss.item():.3f} balance {balance.item():.3f} lr {rate:.2e} "
                f"tok/s {speed:.0f}",
                flush=True,
            )
        if step % SAVE_STEPS == 0:
            print("held-out", evaluate(model, data), flush=True)
            save(model, out)
    print("final held-out", evaluate(model, data), "steps", step, flush=True)
    save(model, out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the bundled demo model from scratch.")
    parser.add_argument("out", type=Path, help="directory for the model, in the Hugging Face layout")
    parser.add_argument("--minutes", type=float, default=80.0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    np.random.seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    data = load_data(args.out)
    model = LanguageModel()
    print("params", sum(p.numel() for p in model.parameters()) / 1e6, flush=True)
    train(model, data, args.out, args.minutes * 60)


if __name__ == "__main__":
    main()
