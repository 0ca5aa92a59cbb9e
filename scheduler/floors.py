"""How many cached blocks each layer keeps for itself."""

from __future__ import annotations

from collections.abc import Mapping

_PASSING = 2  # slots through which the layers without a floor pass: one in use, one being read


def layer_floors(slots: int, experts_per_layer: Mapping[int, int], floor: int) -> dict[int, int]:
    """Layer → blocks that other layers may not take: `floor`, or all experts of a layer that has fewer.

    Layers are used in turn, so a pool without floors that is smaller than a cycle evicts each block just before it is
    needed. When the slots do not suffice, they are dealt out evenly, the first layers first, but for as many as one
    layer wants to use at a time: a dense model of 40 layers in 30 slots keeps 28 of them and reads 12 per token.
    """
    wanted = {layer: min(floor, experts) for layer, experts in experts_per_layer.items()}
    if sum(wanted.values()) <= slots:
        return wanted
    floors = dict.fromkeys(wanted, 0)
    spare = slots - max(_PASSING, *wanted.values())
    while spare > 0:
        for layer in wanted:
            if spare > 0 and floors[layer] < wanted[layer]:
                floors[layer] += 1
                spare -= 1
    return floors
