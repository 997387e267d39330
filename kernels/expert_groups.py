"""Routing of many tokens and the order that grouped products need, without the host: top-k in one launch, a stable counting sort in two.

Letters: T tokens, K experts per token, E experts, N = T·K (token, choice) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .triton_support import jit, next_power_of_2, tl, triton

# Pairs that one program of the sort takes.
SORT_BLOCK = 256


@dataclass(frozen=True)
class Groups:
    """``row_of [N]`` int32: sorted place -> pair (token · K + choice). ``place_of [N]`` int32: pair -> sorted place. ``ends [E]`` int32: where each
    expert's pairs end."""

    row_of: torch.Tensor
    place_of: torch.Tensor
    ends: torch.Tensor


def plan_groups_eager(ids: torch.Tensor, experts: int) -> Groups:
    """``ids [T, K]`` -> pairs in a stable order by expert."""
    flat = ids.reshape(-1)
    row_of = torch.argsort(flat, stable=True)
    place_of = torch.empty_like(row_of)
    place_of[row_of] = torch.arange(flat.numel(), device=ids.device)
    ends = torch.bincount(flat, minlength=experts).cumsum(0)
    return Groups(row_of.int(), place_of.int(), ends.int())


@jit
def _route(logits, weights, ids, tokens, experts, E: tl.constexpr, K: tl.constexpr, PAD_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, E)[None, :]
    inside = (token < tokens)[:, None] & (number < experts)
    logit = tl.load(logits + token[:, None] * experts + number, mask=inside, other=float("-inf"))
    logit = tl.where((token < tokens)[:, None], logit, 0.0)
    p = tl.exp(logit - tl.max(logit, axis=1, keep_dims=True))
    left = tl.where(number < experts, p / tl.sum(p, axis=1, keep_dims=True), -1.0)
    place = tl.arange(0, PAD_K)[None, :]
    best, chosen = tl.zeros([BLOCK, PAD_K], tl.float32), tl.zeros([BLOCK, PAD_K], tl.int32)
    for slot in tl.static_range(K):
        highest = tl.max(left, axis=1, keep_dims=True)
        expert = tl.min(tl.where(left == highest, number, E), axis=1, keep_dims=True)
        best = tl.where(place == slot, highest, best)
        chosen = tl.where(place == slot, expert, chosen)
        left = tl.where(number == expert, -1.0, left)
    total = tl.maximum(tl.sum(best, axis=1, keep_dims=True), 1e-8)
    mask = (token < tokens)[:, None] & (place < K)
    tl.store(weights + token[:, None] * K + place, best / total, mask=mask)
    tl.store(ids + token[:, None] * K + place, chosen, mask=mask)


def route_triton(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``router.route_eager``; ids are int32 and equal probabilities go by the expert's number. ``logits [T, E]`` fp32, contiguous."""
    tokens, experts = logits.shape
    weights = torch.empty(tokens, topk, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, topk, dtype=torch.int32, device=logits.device)
    block = 16
    _route[(triton.cdiv(tokens, block),)](
        logits, weights, ids, tokens, experts, E=next_power_of_2(experts), K=topk, PAD_K=next_power_of_2(topk), BLOCK=block, num_warps=4
    )
    return weights, ids


@jit
def _count(ids, counts, pairs, E: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    pair = program * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < pairs, other=E)
    hits = (expert[:, None] == tl.arange(0, E)[None, :]).to(tl.int32)
    tl.store(counts + program * E + tl.arange(0, E), tl.sum(hits, axis=0))


@jit
def _place(ids, counts, row_of, place_of, ends, pairs, experts, programs, E: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    program = tl.program_id(0)
    number = tl.arange(0, E)
    before = tl.zeros([E], tl.int32)
    total = tl.zeros([E], tl.int32)
    for first in tl.static_range(0, PROGRAMS, 64):
        other = first + tl.arange(0, 64)
        count = tl.load(counts + other[:, None] * E + number[None, :], mask=(other < programs)[:, None], other=0)
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where((other < program)[:, None], count, 0), axis=0)
    end = tl.cumsum(total, axis=0)
    if program == 0:
        tl.store(ends + number, end, mask=number < experts)
    start = end - total + before
    pair = program * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < pairs, other=E)
    hits = (expert[:, None] == number[None, :]).to(tl.int32)
    rank = tl.cumsum(hits, axis=0) - hits
    place = tl.sum(hits * (rank + start[None, :]), axis=1)
    tl.store(place_of + pair, place, mask=pair < pairs)
    tl.store(row_of + place, pair, mask=pair < pairs)


def plan_groups_triton(ids: torch.Tensor, experts: int) -> Groups:
    """As :func:`plan_groups_eager` for int32 ``ids``, in two launches and without the host."""
    pairs, device = ids.numel(), ids.device
    padded = next_power_of_2(experts)
    programs = triton.cdiv(pairs, SORT_BLOCK)
    counts = torch.empty(programs, padded, dtype=torch.int32, device=device)
    row_of, place_of = (torch.empty(pairs, dtype=torch.int32, device=device) for _ in range(2))
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    _count[(programs,)](ids, counts, pairs, E=padded, BLOCK=SORT_BLOCK, num_warps=4)
    _place[(programs,)](
        ids, counts, row_of, place_of, ends, pairs, experts, programs, E=padded, BLOCK=SORT_BLOCK, PROGRAMS=next_power_of_2(programs), num_warps=4
    )
    return Groups(row_of, place_of, ends)
