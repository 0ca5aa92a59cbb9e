"""GGUF metadata as hub configuration keys, so that a family reads one vocabulary.

Source of the key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri_offload.checkpoint.base import Checkpoint, Tensor
from colibri_offload.errors import CheckpointError, UnsupportedError

_PLAIN = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rotary_dim": "rope.dimension_count",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
}

_YARN = {
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


@dataclass(frozen=True)
class GgufKeys:
    """The metadata of one architecture: `get("block_count")` reads "<arch>.block_count"."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    origin: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> GgufKeys:
        """The keys of an open GGUF. Raises CheckpointError when it does not name its architecture."""
        keys = cls(checkpoint.metadata, checkpoint.tensors, str(checkpoint.path))
        if not isinstance(checkpoint.metadata.get("general.architecture"), str):
            raise CheckpointError(f"{checkpoint.path}: general.architecture is missing: this is no model file")
        return keys

    @property
    def arch(self) -> str:
        return self.metadata["general.architecture"]

    def get(self, key: str, default: Any = None) -> Any:
        """A key of the architecture. One value per layer is accepted when all agree."""
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, list) and value:
            if any(v != value[0] for v in value):
                raise UnsupportedError(f"{self.origin}: {self.arch}.{key} differs between layers: not supported")
            return value[0]
        return value

    def width(self, name: str, axis: int) -> int | None:
        """The size of an axis of the first layer's tensor "blk.N.<name>" that is present."""
        for n in range(int(self.get("block_count", 0))):
            tensor = self.tensors.get(f"blk.{n}.{name}")
            if tensor is not None:
                return tensor.shape[axis]
        return None

    def common(self) -> dict[str, Any]:
        """The keys that all families share; absent ones stay absent."""
        found = {hub: self.get(key) for hub, key in _PLAIN.items()}
        hub = {key: value for key, value in found.items() if value is not None}
        hub["vocab_size"] = self._embedding_rows()
        hub["tie_word_embeddings"] = "output.weight" not in self.tensors
        hub["bos_token_id"] = self.metadata.get("tokenizer.ggml.bos_token_id")
        ends = [self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        hub["eos_token_id"] = [end for end in ends if end is not None]
        hub["rope_scaling"] = self._rope_scaling()
        hub["rope_freq_factors"] = self._rope_factors()
        if self.get("expert_count") and self.get("expert_feed_forward_length") is None:
            # Files older than the key: the tensors know the width.
            hub["moe_intermediate_size"] = self.width("ffn_gate_exps.weight", 1)
        return hub

    def _embedding_rows(self) -> int:
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError(f"{self.origin}: tensor token_embd.weight is missing; download the file again")
        return embedding.shape[0]

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self.get("rope.scaling.type", "none")
        factor = self.get("rope.scaling.factor", self.get("rope.scale_linear"))
        if kind == "none":
            return {"rope_type": "linear", "factor": factor} if factor not in (None, 0.0, 1.0) else None
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            scaling |= {hub: self.get(key) for hub, key in _YARN.items()}
            # Writers store 0.1·mscale_all_dim; the cos/sin factor is then 1, as mscale equals it in all such models.
            log_multiplier = self.get("rope.scaling.yarn_log_multiplier")
            if log_multiplier:
                scaling["mscale"] = scaling["mscale_all_dim"] = 10.0 * log_multiplier
        return scaling

    def _rope_factors(self) -> list[float] | None:
        tensor = self.tensors.get("rope_freqs.weight")
        if tensor is None:
            return None
        if tensor.fmt != "F32":
            raise UnsupportedError(f"{self.origin}: rope_freqs.weight has format {tensor.fmt}; only F32 is supported")
        factors = tensor.read().reshape(-1).view(np.float32)
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            raise CheckpointError(f"{self.origin}: rope_freqs.weight has values not above 0; download it again")
        return [float(f) for f in factors]
