"""The order that grouped products need, without the host: a stable counting sort whose counts the router has made (:mod:`.route_tokens`).

Letters: T tokens, K experts per token, E experts, N = T·K (token, choice) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .router import Counts
from .triton_support import jit, next_power_of_2, tl, triton

# Tokens that one program places; a multiple of every block of the counts.
PLACE_TOKENS = 64
# Blocks of the counts that are read at a time.
COUNT_ROWS = 64


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


def count_eager(ids: torch.Tensor, experts: int, block: int = PLACE_TOKENS) -> Counts:
    """What the router counts: ``ids [T, K]``, no expert twice in a row -> choices in each ``block`` tokens."""
    padded = max(16, next_power_of_2(experts))
    hits = F.one_hot(ids.long(), padded).sum(1)
    hits = F.pad(hits, (0, 0, 0, -len(hits) % block))
    return Counts(hits.unflatten(0, (-1, block)).sum(1).to(torch.uint8), block)


@jit
def _place(
    ids, counts, row_of, place_of, ends, tokens, experts, blocks, step,
    E: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    number = tl.arange(0, E)
    before, total = tl.zeros([E], tl.int32), tl.zeros([E], tl.int32)
    for first in range(0, blocks, ROWS):
        other = first + tl.arange(0, ROWS)
        count = tl.load(counts + other[:, None] * E + number[None, :], mask=(other < blocks)[:, None], other=0).to(tl.int32)
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where((other < program * step)[:, None], count, 0), axis=0)
    end = tl.cumsum(total, axis=0)
    if program == 0:
        tl.store(ends + number, end, mask=number < experts)
    row = tl.arange(0, TOKENS)
    token = program * TOKENS + row
    here = token < tokens
    hits = tl.zeros([TOKENS, E], tl.int32)
    for slot in tl.static_range(K):
        expert = tl.load(ids + token * K + slot, mask=here, other=E)
        hits += (expert[:, None] == number[None, :]).to(tl.int32)
    # A token chooses an expert once, so an expert's pairs are in the order of their tokens: how many earlier tokens of this block chose it is a product
    # with a triangle of ones, exact in fp16.
    earlier = (row[None, :] < row[:, None]).to(tl.float16)
    rank = tl.dot(earlier, hits.to(tl.float16)).to(tl.int32)
    start = rank + (end - total + before)[None, :]
    for slot in tl.static_range(K):
        pair = token * K + slot
        expert = tl.load(ids + pair, mask=here, other=E)
        place = tl.sum(tl.where(expert[:, None] == number[None, :], start, 0), axis=1)
        tl.store(place_of + pair, place, mask=here)
        tl.store(row_of + place, pair, mask=here)


def plan_groups_triton(ids: torch.Tensor, experts: int, counts: Counts) -> Groups:
    """As :func:`plan_groups_eager` for int32 ``ids`` without equal ones in a row, in one launch."""
    (tokens, topk), device = ids.shape, ids.device
    blocks, padded = counts.table.shape
    row_of, place_of = (torch.empty(ids.numel(), dtype=torch.int32, device=device) for _ in range(2))
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    _place[(triton.cdiv(tokens, PLACE_TOKENS),)](
        ids, counts.table, row_of, place_of, ends, tokens, experts, blocks, PLACE_TOKENS // counts.block,
        E=padded, K=topk, TOKENS=PLACE_TOKENS, ROWS=COUNT_ROWS, num_warps=4,
    )  # fmt: skip
    return Groups(row_of, place_of, ends)
