"""Top-k router of the mixture of experts, fp32 throughout (spec 3.6)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def router_logits_eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x [T, H]``, ``weight [E, H]`` fp32 -> logits ``[T, E]`` fp32."""
    return F.linear(x.float(), weight)


def route_eager(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, then the ``topk`` largest, normalised to sum 1.

    Returns weights ``[T, topk]`` fp32 in descending order and expert ids ``[T, topk]`` int64.
    """
    weights, ids = torch.softmax(logits, dim=-1).topk(topk, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-8), ids
