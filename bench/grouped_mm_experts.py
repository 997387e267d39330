"""Routed experts through PyTorch's own grouped product, for the table of ``phase-parallel bench denoise`` only: what a user gets without kernels of ours
for the two products. Sort and sum stay this pack's, so that rows differ in the products and in what lies between them.

Letters: T tokens, K experts per token, E experts, N = T·K (token, choice) pairs, H hidden, M micro shards, I expert width of one micro shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from ..kernels.expert_groups import plan_groups_eager, plan_groups_triton
from ..kernels.grouped_experts import _combine
from ..kernels.kernel_set import KernelSet
from ..kernels.moe import ExpertBlock, MoePath, gated_unit_eager, gated_unit_triton
from ..kernels.router import Routing
from ..kernels.triton_support import next_power_of_2, triton

GROUPED_MM = "grouped_mm"
BLOCK = 2048


def why_not_grouped_mm() -> str | None:
    """None when this torch has the product."""
    return None if _product() is not None else f"torch {torch.__version__} has no grouped_mm"


def _product() -> Callable[..., torch.Tensor] | None:
    return getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def with_grouped_mm(kernels: KernelSet) -> KernelSet:
    return replace(kernels, experts=grouped_mm_experts, moe=GROUPED_MM)


def grouped_mm_experts(x: torch.Tensor, blocks: tuple[ExpertBlock, ...], routing: Routing, shared: torch.Tensor, path: MoePath) -> torch.Tensor:
    """As ``KernelSet.experts``: ``x [T, H]``, blocks, a routing, ``shared [T, H]`` to be added -> this rank's summand ``[T, H]``. Nothing waits for the
    device, and every sum has a fixed order."""
    if path == "multi_micro":
        return _dispatch(x, blocks, routing, shared)
    for block in blocks:
        shared = _dispatch(x, (block,), routing, shared)
    return shared


def _dispatch(x: torch.Tensor, blocks: tuple[ExpertBlock, ...], routing: Routing, shared: torch.Tensor) -> torch.Tensor:
    product = _product()
    experts, topk = blocks[0].w1.shape[0], routing.ids.shape[1]
    groups = plan_groups_triton(routing.ids, experts, routing.counts) if x.is_cuda else plan_groups_eager(routing.ids, experts)
    unit = gated_unit_triton if x.is_cuda else gated_unit_eager
    pairs = x.index_select(0, groups.row_of // topk)  # [N, H], by expert
    total: torch.Tensor | None = None
    for block in blocks:
        hidden = unit(product(pairs, block.w1.transpose(1, 2), offs=groups.ends), block.micros)
        part = product(hidden, block.w2.transpose(1, 2), offs=groups.ends)
        total = part if total is None else total.float() + part.float()
    return (_sum_triton if x.is_cuda else _sum_eager)(total, groups.place_of, routing.weights, shared)


def _sum_eager(parts: torch.Tensor, place_of: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """``parts [N, H]`` by expert -> ``[T, H]``, weighed and added in fp32, rounded once."""
    chosen = parts.index_select(0, place_of).float().unflatten(0, weights.shape)
    return ((chosen * weights.unsqueeze(-1)).sum(1) + shared.float()).to(shared.dtype)


def _sum_triton(parts: torch.Tensor, place_of: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(shared)
    tokens, hidden = shared.shape
    block = min(BLOCK, next_power_of_2(hidden))
    _combine[(tokens, triton.cdiv(hidden, block))](
        parts, place_of, weights, shared, out, hidden, K=weights.shape[1], SHARED=True, BLOCK=block, num_warps=4
    )
    return out
