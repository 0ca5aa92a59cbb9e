"""DeepSeek-V3, R1 and Kimi-K2 (the same architecture). Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2."""

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


def deepseek_v3_spec(config: Config) -> ModelSpec:
    """Sigmoid scores; bias and groups (by their two best) act on the choice only; weights normalised, then scaled."""
    config.choice("scoring_func", "sigmoid", ("sigmoid",))
    method = config.choice("topk_method", "noaux_tc", ("noaux_tc", "group_limited_greedy"))
    router = Router(
        "sigmoid",
        renormalise=config.flag("norm_topk_prob", True),
        scaling=config.number("routed_scaling_factor", 1.0),
        denominator_eps=1e-20,
        choice_bias=method == "noaux_tc",
        groups=config.integer("n_group", default=1),
        top_groups=config.integer("topk_group", default=1),
        group_score="top2_sum",
    )
    return deepseek_spec(config, "deepseek_v3", router)


DEEPSEEK_V3 = Family(
    model_types=("deepseek_v3", "kimi_k2"),
    spec=deepseek_v3_spec,
    hub=deepseek_hub,
    gguf_arch="deepseek2",
    gguf_match=sigmoid_gated,
    gguf_keys=deepseek_gguf_keys,
    gguf=deepseek_gguf,
)
