"""Routed experts for many tokens as two grouped matrix products that know the routing, without the host.

``plan_groups`` sorts the (token, choice) pairs by expert with a stable counting sort; ``grouped_up`` reads each token's row where it lies, multiplies it
with the chosen expert's [up, gate] rows and applies the gated unit before anything is stored; ``grouped_down`` adds all micro shards inside the matrix
unit; ``combine`` weighs and adds each token's choices, and the shared expert, in a fixed order.

Letters: T tokens, K experts per token, E experts, N = T·K pairs, H hidden, M micro shards, I expert width of one micro shard on this rank.
Weights are ``w1 [E, 2·I, H]`` and ``w2 [E, H, I]`` per micro shard, as views with any expert, row and micro strides and contiguous columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .moe import ExpertBlock
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


@jit
def _tile(ends, experts, E: tl.constexpr, BM: tl.constexpr):
    """Expert, first and last (exclusive) pair of tile ``program_id(1)``; the expert is E for tiles behind the last one."""
    tile = tl.program_id(1)
    number = tl.arange(0, E)
    end = tl.load(ends + number, mask=number < experts, other=0)
    start = tl.load(ends + number - 1, mask=(number > 0) & (number < experts), other=0)
    tiles = tl.where(number < experts, (end - start + BM - 1) // BM, 0)
    last_tile = tl.cumsum(tiles, axis=0)
    expert = tl.sum((last_tile <= tile).to(tl.int32), axis=0)
    mine = number == expert
    first = tl.sum(tl.where(mine, start + (tile - last_tile + tiles) * BM, 0), axis=0)
    last = tl.sum(tl.where(mine, end, 0), axis=0)
    return expert, first, last


@jit
def _grouped_up(
    x, row_of, ends, w1, out, experts, width, expert_stride, row_stride, micro_stride, x_stride,
    hidden: tl.constexpr, micros: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    expert, first, last = _tile(ends, experts, E, BM)
    if expert < experts:
        blocks = tl.cdiv(width, BN)
        micro, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
        place = first + tl.arange(0, BM)
        pair = tl.load(row_of + place, mask=place < last, other=0)
        column = block * BN + tl.arange(0, BN)
        inner = tl.arange(0, BK)
        a = x + (pair // K).to(tl.int64)[:, None] * x_stride + inner[None, :]
        weight = w1 + expert.to(tl.int64) * expert_stride + micro.to(tl.int64) * micro_stride
        up_at = weight + column.to(tl.int64)[None, :] * row_stride + inner[:, None]
        gate_at = up_at + width.to(tl.int64) * row_stride
        up = tl.zeros([BM, BN], tl.float32)
        gate = tl.zeros([BM, BN], tl.float32)
        for start in range(0, hidden, BK):
            if EVEN:
                rows, ups, gates = tl.load(a), tl.load(up_at), tl.load(gate_at)
            else:
                inside = start + inner < hidden
                rows = tl.load(a, mask=inside[None, :], other=0.0)
                mask = inside[:, None] & (column < width)[None, :]
                ups, gates = tl.load(up_at, mask=mask, other=0.0), tl.load(gate_at, mask=mask, other=0.0)
            up = tl.dot(rows, ups, up, input_precision="ieee")
            gate = tl.dot(rows, gates, gate, input_precision="ieee")
            a += BK
            up_at += BK
            gate_at += BK
        result = up * gate * tl.sigmoid(gate)
        to = out + place.to(tl.int64)[:, None] * (micros * width) + micro * width + column[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=(place < last)[:, None] & (column < width)[None, :])


@jit
def _grouped_down(
    act, ends, w2, out, experts, hidden, expert_stride, row_stride, micro_stride,
    width: tl.constexpr, micros: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    expert, first, last = _tile(ends, experts, E, BM)
    if expert < experts:
        place = first + tl.arange(0, BM)
        column = tl.program_id(0) * BN + tl.arange(0, BN)
        inner = tl.arange(0, BK)
        a = act + place.to(tl.int64)[:, None] * (micros * width) + inner[None, :]
        base = w2 + expert.to(tl.int64) * expert_stride + column.to(tl.int64)[None, :] * row_stride + inner[:, None]
        total = tl.zeros([BM, BN], tl.float32)
        rows_mask = (place < last)[:, None]
        for micro in tl.static_range(micros):
            for start in range(0, width, BK):
                if EVEN:
                    rows = tl.load(a + micro * width + start, mask=rows_mask, other=0.0)
                    weights = tl.load(base + micro * micro_stride + start)
                else:
                    inside = start + inner < width
                    rows = tl.load(a + micro * width + start, mask=rows_mask & inside[None, :], other=0.0)
                    weights = tl.load(base + micro * micro_stride + start, mask=inside[:, None] & (column < hidden)[None, :], other=0.0)
                total = tl.dot(rows, weights, total, input_precision="ieee")
        to = out + place.to(tl.int64)[:, None] * hidden + column[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=rows_mask & (column < hidden)[None, :])


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


@dataclass(frozen=True)
class MicroViews:
    """All micro shards of a layer's experts as one base and strides, counted in elements."""

    w1: torch.Tensor
    w2: torch.Tensor
    micros: int
    width: int
    w1_micro_stride: int
    w2_micro_stride: int

    @classmethod
    def of(cls, blocks: tuple[ExpertBlock, ...]) -> MicroViews:
        """``micro_major`` blocks are equally spaced views of one tensor; one block may hold several micro shards side by side."""
        first = blocks[0]
        width = first.w2.shape[2] // first.micros
        if len(blocks) == 1:
            return cls(first.w1, first.w2, first.micros, width, 2 * width * first.w1.stride(1), width)
        strides = []
        for name in ("w1", "w2"):
            places = [getattr(block, name).data_ptr() for block in blocks]
            steps = {after - before for before, after in zip(places, places[1:], strict=False)}
            if len(steps) != 1 or any(block.micros != 1 for block in blocks):
                raise ValueError("expert blocks of several micro shards must be equally spaced views of one tensor")
            strides.append(steps.pop() // first.w1.element_size())
        return cls(first.w1, first.w2, len(blocks), width, *strides)


def why_not_grouped(x: torch.Tensor, blocks: tuple[ExpertBlock, ...]) -> str | None:
    """None when the grouped kernels take these tensors, else the reason."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{x.dtype} is no dtype of the matrix unit"
    if any(tensor.stride(-1) != 1 for block in blocks for tensor in (block.w1, block.w2)):
        return "columns of the expert weights are not contiguous"
    return None


def tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile: large ones when experts have enough rows to fill them."""
    return 128 if pairs // experts >= 96 else 64 if pairs // experts >= 24 else 16


def grouped_experts(
    x: torch.Tensor, blocks: tuple[ExpertBlock, ...], weights: torch.Tensor, ids: torch.Tensor, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """``x [T, H]``, routing ``weights, ids [T, K]`` (fp32, int32), ``shared [T, H]`` to be added -> this rank's summand ``[T, H]``."""
    tokens, hidden = x.shape
    experts, topk = blocks[0].w1.shape[0], ids.shape[1]
    views = MicroViews.of(blocks)
    groups = plan_groups_triton(ids, experts)
    pairs, bm = ids.numel(), tile_rows(ids.numel(), experts)
    tiles = min(triton.cdiv(pairs, bm) + experts, pairs)
    act = torch.empty(pairs, views.micros * views.width, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    padded = next_power_of_2(experts)
    half = x.element_size() == 2
    bn, bk = (128, 64) if half and bm > 16 else (32, 32)
    _grouped_up[(views.micros * triton.cdiv(views.width, bn), tiles)](
        x, groups.row_of, groups.ends, views.w1, act, experts, views.width, views.w1.stride(0), views.w1.stride(1), views.w1_micro_stride, x.stride(0),
        hidden=hidden, micros=views.micros, E=padded, K=topk, BM=bm, BN=bn, BK=bk, EVEN=hidden % bk == 0 and views.width % bn == 0,
        num_warps=8 if bm == 128 else 4, num_stages=3,
    )  # fmt: skip
    bn = 256 if half and bm == 128 and hidden % 256 == 0 else bn
    _grouped_down[(triton.cdiv(hidden, bn), tiles)](
        act, groups.ends, views.w2, parts, experts, hidden, views.w2.stride(0), views.w2.stride(1), views.w2_micro_stride,
        width=views.width, micros=views.micros, E=padded, BM=bm, BN=bn, BK=bk, EVEN=views.width % bk == 0 and hidden % bn == 0,
        num_warps=8 if bm == 128 else 4, num_stages=3,
    )  # fmt: skip
    out = torch.empty_like(x)
    block = min(2048, next_power_of_2(hidden))
    _combine[(tokens, triton.cdiv(hidden, block))](
        parts, groups.place_of, weights, x if shared is None else shared, out, hidden, K=topk, SHARED=shared is not None, BLOCK=block, num_warps=4
    )
    return out
