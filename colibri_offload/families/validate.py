"""Relations between the numbers of a spec that single look-ups cannot see."""

from __future__ import annotations

from colibri_offload.errors import CheckpointError
from colibri_offload.families.spec import ModelSpec, MoE


def validate(spec: ModelSpec, origin: str) -> None:
    """Raises CheckpointError naming the numbers that contradict each other."""
    for n, layer in enumerate(spec.layers):
        if isinstance(layer.ffn, MoE):
            problem = _routing_problem(layer.ffn)
            if problem:
                raise CheckpointError(f"{origin}: layer {n}: {problem}; fetch the configuration again")


def _routing_problem(moe: MoE) -> str | None:
    groups, top_groups = moe.router.groups, moe.router.top_groups
    if moe.experts < 1:
        return "the number of routed experts is 0"
    if moe.top_k > moe.experts:
        return f"{moe.top_k} experts per token are more than the {moe.experts} routed experts"
    if moe.experts % groups:
        return f"{moe.experts} experts do not divide into {groups} groups"
    if top_groups > groups:
        return f"{top_groups} groups per token are more than the {groups} groups"
    if moe.top_k > top_groups * (moe.experts // groups):
        return f"{top_groups} groups of {moe.experts // groups} experts hold fewer than {moe.top_k} experts per token"
    if moe.router.group_score == "top2_sum" and groups > 1 and moe.experts // groups < 2:
        return f"groups of {moe.experts // groups} expert cannot be ranked by their two best"
    return None
