"""Routed experts for many tokens as two grouped matrix products that know the routing, without the host.

The (token, choice) pairs are sorted by expert (:mod:`.expert_groups`). The first product multiplies each pair's token with the chosen expert's
[up, gate] rows and applies the gated unit before anything is stored; the second adds all micro shards inside the matrix unit; ``_combine`` weighs and
adds each token's choices, and the shared expert, in a fixed order.

Letters: T tokens, K experts per token, E experts, N = T·K pairs, H hidden, M micro shards, I expert width of one micro shard on this rank.
Weights are ``w1 [E, 2·I, H]`` and ``w2 [E, H, I]`` per micro shard, as views with any expert, row and micro strides and contiguous columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .expert_groups import Groups, plan_groups_triton
from .expert_views import MicroViews
from .grouped_descriptors import descriptors_fit, experts_by_descriptors
from .grouped_hopper import experts_by_clusters, hopper_fits
from .grouped_pointers import experts_by_pointers
from .moe import ExpertBlock
from .router import Routing
from .triton_support import jit, next_power_of_2, tl, triton

# Pairs per expert from which wide tiles pay.
DESCRIPTORS_FROM = 96
CLUSTERS_FROM = 96

# (x, views, groups, experts, topk) -> each pair's output of its expert, in the groups' order, [N, H].
Products = Callable[[torch.Tensor, MicroViews, Groups, int, int], torch.Tensor]


@jit
def _combine(parts, place_of, weights, shared, out, hidden, K: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):
        place = tl.load(place_of + token * K + choice).to(tl.int64)
        part = tl.load(parts + place * hidden + column, mask=inside, other=0.0).to(tl.float32)
        total += part * tl.load(weights + token * K + choice)
    at = token.to(tl.int64) * hidden + column
    if SHARED:
        total += tl.load(shared + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def _products(x: torch.Tensor, views: MicroViews, pairs_per_expert: float) -> Products:
    """The fastest way to both products that fits."""
    if pairs_per_expert >= CLUSTERS_FROM and hopper_fits(x, views, views.w1.shape[0]):
        return experts_by_clusters
    if pairs_per_expert >= DESCRIPTORS_FROM and descriptors_fit(views):
        return experts_by_descriptors
    return experts_by_pointers


def grouped_experts(
    x: torch.Tensor, blocks: tuple[ExpertBlock, ...], routing: Routing, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """``x [T, H]``, a routing with counts, ``shared [T, H]`` to be added -> this rank's summand ``[T, H]``."""
    tokens, hidden = x.shape
    weights, ids = routing.weights, routing.ids
    experts, topk = blocks[0].w1.shape[0], ids.shape[1]
    views = MicroViews.of(blocks)
    groups = plan_groups_triton(ids, experts, routing.counts)
    parts = _products(x, views, ids.numel() / experts)(x, views, groups, experts, topk)
    out = torch.empty_like(x)
    block = min(2048, next_power_of_2(hidden))
    _combine[(tokens, triton.cdiv(hidden, block))](
        parts, groups.place_of, weights, x if shared is None else shared, out, hidden, K=topk, SHARED=shared is not None, BLOCK=block, num_warps=4
    )
    return out
