"""Routed experts: one routing, one permutation, grouped GEMMs, one finalize.

Letters: T tokens, K experts per token, E experts, H hidden, M micro shards, I expert width of one micro shard on this rank.

A rank's experts are a tuple of *blocks*. A block has ``w1 [E, m·2·I, H]``, whose rows are [up, gate] for each of its m micro shards in turn, and
``w2 [E, H, m·I]``. ``micro_major`` weights are M blocks with m = 1 (views of one tensor ``[M, E, …]``), ``expert_major`` weights are one block with
m = M; in prefill and decode a rank uses one block with m = 1, contiguous in the first layout and strided in the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F

from .triton_support import jit, tl, triton

MoeLayout = Literal["micro_major", "expert_major"]
MoePath = Literal["multi_micro", "two_dispatch"]
MOE_LAYOUTS: tuple[MoeLayout, ...] = get_args(MoeLayout)
MOE_PATHS: tuple[MoePath, ...] = get_args(MoePath)


@dataclass(frozen=True)
class ExpertBlock:
    """``w1 [E, m·2·I, H]``, ``w2 [E, H, m·I]``, ``micros`` = m."""

    w1: torch.Tensor
    w2: torch.Tensor
    micros: int


@dataclass(frozen=True)
class Permutation:
    """Copies of tokens sorted by expert: ``token [T·K]`` (source row), ``slot [T·K]`` (place in the flattened routing table), ``counts [E]``."""

    token: torch.Tensor
    slot: torch.Tensor
    counts: torch.Tensor


def permute_eager(ids: torch.Tensor, num_experts: int) -> Permutation:
    """``ids [T, K]`` -> stable order by expert, so that equal inputs give equal bits on every rank."""
    slot = torch.argsort(ids.reshape(-1), stable=True)
    counts = torch.bincount(ids.reshape(-1), minlength=num_experts)
    return Permutation(slot // ids.shape[1], slot, counts)


def gated_unit_eager(hidden: torch.Tensor, micros: int) -> torch.Tensor:
    """``[n, m·2·I]`` with [up, gate] per micro shard -> ``up · silu(gate)`` ``[n, m·I]``. The *second* half is activated (spec 3.5)."""
    up, gate = hidden.unflatten(-1, (micros, 2, -1)).unbind(dim=-2)
    return (up * F.silu(gate)).flatten(-2)


@jit
def _gated_unit(hidden, out, elements, width, micros, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    block, column = at // width, at % width
    up = tl.load(hidden + block * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(hidden + block * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (up * gate * tl.sigmoid(gate)).to(out.dtype.element_ty), mask=inside)


def gated_unit_triton(hidden: torch.Tensor, micros: int) -> torch.Tensor:
    """As :func:`gated_unit_eager` for contiguous ``hidden``, rounded once."""
    tokens, columns = hidden.shape
    out = torch.empty(tokens, columns // 2, dtype=hidden.dtype, device=hidden.device)
    _gated_unit[(triton.cdiv(out.numel(), 2048),)](hidden, out, out.numel(), columns // 2 // micros, micros, BLOCK=2048, num_warps=4)
    return out


def grouped_experts_eager(x: torch.Tensor, counts: torch.Tensor, block: ExpertBlock) -> torch.Tensor:
    """``x [n, H]`` sorted by expert -> ``[n, H]``, this block's summand of each copy."""
    out = torch.empty_like(x)
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            rows = x[start : start + count]
            out[start : start + count] = F.linear(gated_unit_eager(F.linear(rows, block.w1[expert]), block.micros), block.w2[expert])
            start += count
    return out


def finalize_eager(parts: list[torch.Tensor], permutation: Permutation, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Adds the blocks in fp32, multiplies by the routing weight once and reduces the K copies once: ``[n, H]`` each -> ``[T, H]``."""
    tokens, topk = weights.shape
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    unsorted = torch.empty_like(total)
    unsorted[permutation.slot] = total
    return (unsorted.view(tokens, topk, -1) * weights.unsqueeze(-1)).sum(dim=1).to(dtype)


def moe_eager(
    x: torch.Tensor, blocks: tuple[ExpertBlock, ...], weights: torch.Tensor, ids: torch.Tensor, *, path: MoePath
) -> torch.Tensor:
    """``x [T, H]``, routing ``weights, ids [T, K]`` -> this rank's summand of the routed output ``[T, H]``.

    ``multi_micro``: one permutation and one finalize for all blocks. ``two_dispatch`` (ablation): a complete expert pass per block, then a sum.
    """
    num_experts = blocks[0].w1.shape[0]
    if path == "two_dispatch":
        total = None
        for block in blocks:
            permutation = permute_eager(ids, num_experts)
            part = grouped_experts_eager(x[permutation.token], permutation.counts, block)
            done = finalize_eager([part], permutation, weights, x.dtype)
            total = done if total is None else total + done
        return total
    permutation = permute_eager(ids, num_experts)
    sorted_x = x[permutation.token]
    parts = [grouped_experts_eager(sorted_x, permutation.counts, block) for block in blocks]
    return finalize_eager(parts, permutation, weights, x.dtype)
