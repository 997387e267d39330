"""Top-k router of the mixture of experts, fp32 throughout (spec 3.6); :mod:`.route_tokens` does the same for many tokens in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Counts:
    """Choices of each block of tokens, the first half of the sort by expert: ``table [B, E]`` uint8 with E padded to a power of 2, in blocks of
    ``block`` tokens."""

    table: torch.Tensor
    block: int


@dataclass(frozen=True)
class Routing:
    """``weights [T, K]`` fp32 in descending order, sum 1; ``ids [T, K]`` int32. ``counts`` where the fused experts sort by them; ``logits [T, E]`` fp32
    where they were asked for."""

    weights: torch.Tensor
    ids: torch.Tensor
    counts: Counts | None = None
    logits: torch.Tensor | None = None


def router_logits_eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x [T, H]``, ``weight [E, H]`` fp32 -> logits ``[T, E]`` fp32."""
    return F.linear(x.float(), weight)


def route_eager(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, then the ``topk`` largest, normalised to sum 1.

    Returns weights ``[T, topk]`` fp32 in descending order and expert ids ``[T, topk]`` int64.
    """
    weights, ids = torch.softmax(logits, dim=-1).topk(topk, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-8), ids


def route_tokens_eager(x: torch.Tensor, weight: torch.Tensor, topk: int, keep_logits: bool = False) -> Routing:
    """``x [T, H]``, ``weight [E, H]`` fp32 -> where the tokens go."""
    logits = router_logits_eager(x, weight)
    weights, ids = route_eager(logits, topk)
    return Routing(weights, ids.int(), logits=logits if keep_logits else None)
