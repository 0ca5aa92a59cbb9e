"""DeepSeek-V2 and V2-Lite. Source: DeepSeek-AI 2024, arXiv:2405.04434."""

from __future__ import annotations

from colibri_offload.families.config import Config
from colibri_offload.families.family import Family
from colibri_offload.families.latent import (
    deepseek_gguf,
    deepseek_gguf_keys,
    deepseek_hub,
    deepseek_spec,
    sigmoid_gated,
)
from colibri_offload.families.spec import ModelSpec, Router


def deepseek_v2_spec(config: Config) -> ModelSpec:
    """Softmax over all experts, the groups with the best single expert stay; weights × scaling, not normalised."""
    config.choice("scoring_func", "softmax", ("softmax",))
    method = config.choice("topk_method", "greedy", ("greedy", "group_limited_greedy"))
    grouped = method == "group_limited_greedy"
    router = Router(
        "softmax",
        renormalise=config.flag("norm_topk_prob", False),
        scaling=config.number("routed_scaling_factor", 1.0),
        groups=config.integer("n_group", default=1) if grouped else 1,
        top_groups=config.integer("topk_group", default=1) if grouped else 1,
    )
    return deepseek_spec(config, "deepseek_v2", router)


DEEPSEEK_V2 = Family(
    model_types=("deepseek_v2",),
    spec=deepseek_v2_spec,
    hub=deepseek_hub,
    gguf_arch="deepseek2",
    gguf_match=lambda keys: not sigmoid_gated(keys),
    gguf_keys=deepseek_gguf_keys,
    gguf=deepseek_gguf,
)
