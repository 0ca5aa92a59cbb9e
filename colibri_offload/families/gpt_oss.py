"""gpt-oss. Source: OpenAI 2025, arXiv:2508.10925; reference code github.com/openai/gpt-oss, gpt_oss/torch/model.py."""

from __future__ import annotations

from colibri_offload.families import hub_names as hub
from colibri_offload.families.config import Config
from colibri_offload.families.family import Family
from colibri_offload.families.gguf_keys import GgufKeys
from colibri_offload.families.gguf_names import gguf_table
from colibri_offload.families.parts import attention, experts, layer_count, model_spec, norm, windowed
from colibri_offload.families.spec import Activation, Entry, Layer, ModelSpec, MoE, Router, Source, TensorTable

_MLP = "model.layers.{layer}.mlp."

# Gate and up alternate row by row.
_GATE, _UP = (0, None, 2), (1, None, 2)


def _either(name: str, rows: tuple[int, None, int] | None = None) -> tuple[Source, Source]:
    """MXFP4 experts are stored [E, out, in], float ones [E, in, out]."""
    return Source(name, rows=rows, blocks=True), Source(name, transpose=True, rows=rows, blocks=False)


_EXPERTS: dict[str, Entry] = {
    "router": Source(_MLP + "router.weight"),
    "router.bias": Source(_MLP + "router.bias"),
    "experts.gate": _either(_MLP + "experts.gate_up_proj", _GATE),
    "experts.up": _either(_MLP + "experts.gate_up_proj", _UP),
    "experts.down": _either(_MLP + "experts.down_proj"),
    "experts.gate.bias": Source(_MLP + "experts.gate_up_proj_bias", rows=_GATE),
    "experts.up.bias": Source(_MLP + "experts.gate_up_proj_bias", rows=_UP),
    "experts.down.bias": Source(_MLP + "experts.down_proj_bias"),
}


def gpt_oss_spec(config: Config) -> ModelSpec:
    """Attention with sinks, every other layer with a window; top-k of the logits, then softmax over these k."""
    bias = config.flag("attention_bias", True)
    mixer = attention(config, theta=150000.0, sinks=True, qkv_bias=bias, o_bias=bias)
    ffn = MoE(
        experts=experts(config),
        top_k=config.integer("num_experts_per_tok", "experts_per_token"),
        intermediate=config.integer("intermediate_size"),
        router=Router("softmax_topk", renormalise=False, bias=True),
        activation=Activation(
            "swiglu_oai", config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)
        ),
        bias=True,
    )
    layers = [
        Layer(windowed(config, mixer, i, i % 2 == 0), ffn, norm(config), norm(config))
        for i in range(layer_count(config))
    ]
    return model_spec(config, "gpt_oss", layers)


def gpt_oss_gguf_keys(keys: GgufKeys) -> dict[str, object]:
    """Files do not say that the YaRN ramp keeps its fractional ends."""
    common = keys.common()
    if common["rope_scaling"] is not None:
        common["rope_scaling"]["truncate"] = False
    return common


GPT_OSS = Family(
    model_types=("gpt_oss",),
    spec=gpt_oss_spec,
    hub=lambda spec: TensorTable(hub.GLOBALS, hub.NORMS | hub.ATTENTION | _EXPERTS),
    gguf_arch="gpt-oss",
    gguf_keys=gpt_oss_gguf_keys,
    gguf=gguf_table,
)
