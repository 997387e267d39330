"""Routed experts for many tokens as two grouped matrix products that know the routing, without the host.

The (token, choice) pairs are sorted by expert (:mod:`.expert_groups`); ``grouped_up`` reads each token's row where it lies, multiplies it
with the chosen expert's [up, gate] rows and applies the gated unit before anything is stored; ``grouped_down`` adds all micro shards inside the matrix
unit; ``combine`` weighs and adds each token's choices, and the shared expert, in a fixed order.

Letters: T tokens, K experts per token, E experts, N = T·K pairs, H hidden, M micro shards, I expert width of one micro shard on this rank.
Weights are ``w1 [E, 2·I, H]`` and ``w2 [E, H, I]`` per micro shard, as views with any expert, row and micro strides and contiguous columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from .expert_groups import plan_groups_triton
from .moe import ExpertBlock
from .triton_support import jit, next_power_of_2, tl, triton


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


def _tiles(pairs: int, experts: int, tile: Tile) -> int:
    """Row tiles at most: each expert may end in the middle of one."""
    return min(triton.cdiv(pairs, tile.rows) + experts, pairs)


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
        if any(tensor.stride(-1) != 1 for block in blocks for tensor in (block.w1, block.w2)):
            raise ValueError("expert weights must have contiguous columns")
        first = blocks[0]
        width = first.w2.shape[2] // first.micros
        if len(blocks) == 1:
            return cls(first.w1, first.w2, first.micros, width, 2 * width * first.w1.stride(1), width)
        strides = []
        for name in ("w1", "w2"):
            places = [getattr(block, name).data_ptr() for block in blocks]
            steps = {after - before for before, after in pairwise(places)}
            if len(steps) != 1 or any(block.micros != 1 for block in blocks):
                raise ValueError("expert blocks of several micro shards must be equally spaced views of one tensor")
            strides.append(steps.pop() // first.w1.element_size())
        return cls(first.w1, first.w2, len(blocks), width, *strides)


@dataclass(frozen=True)
class Tile:
    """Sizes of one grouped product: rows of pairs, columns, depth of one step, warps, stages of the pipeline."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def choose_tiles(pairs: int, experts: int, width: int, hidden: int, itemsize: int) -> tuple[Tile, Tile]:
    """Tiles of the up and of the down product; measured on an H200 with the 80B sizes. Small tiles waste fewer rows when experts have few."""
    each = pairs // experts
    if itemsize > 2 or each < 24 or width < 64 or hidden < 128:
        small = Tile(16, 32, 32, 4, 3)
        return small, small
    if each < 96:
        return Tile(64, 128, 64, 4, 4), Tile(64, 128, 64, 4, 4)
    down = Tile(128, 256 if hidden % 256 == 0 else 128, 64, 8, 4 if each < 256 else 3)
    return (Tile(64, 128, 64, 4, 4) if each < 256 else Tile(128, 128, 64, 8, 3)), down


def grouped_experts(
    x: torch.Tensor, blocks: tuple[ExpertBlock, ...], weights: torch.Tensor, ids: torch.Tensor, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """``x [T, H]``, routing ``weights, ids [T, K]`` (fp32, int32), ``shared [T, H]`` to be added -> this rank's summand ``[T, H]``."""
    tokens, hidden = x.shape
    experts, topk = blocks[0].w1.shape[0], ids.shape[1]
    views = MicroViews.of(blocks)
    groups = plan_groups_triton(ids, experts)
    pairs = ids.numel()
    act = torch.empty(pairs, views.micros * views.width, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    padded = next_power_of_2(experts)
    up, down = choose_tiles(pairs, experts, views.width, hidden, x.element_size())
    _grouped_up[(views.micros * triton.cdiv(views.width, up.columns), _tiles(pairs, experts, up))](
        x, groups.row_of, groups.ends, views.w1, act, experts, views.width, views.w1.stride(0), views.w1.stride(1), views.w1_micro_stride, x.stride(0),
        hidden=hidden, micros=views.micros, E=padded, K=topk, BM=up.rows, BN=up.columns, BK=up.depth,
        EVEN=hidden % up.depth == 0 and views.width % up.columns == 0, num_warps=up.warps, num_stages=up.stages,
    )  # fmt: skip
    _grouped_down[(triton.cdiv(hidden, down.columns), _tiles(pairs, experts, down))](
        act, groups.ends, views.w2, parts, experts, hidden, views.w2.stride(0), views.w2.stride(1), views.w2_micro_stride,
        width=views.width, micros=views.micros, E=padded, BM=down.rows, BN=down.columns, BK=down.depth,
        EVEN=views.width % down.depth == 0 and hidden % down.columns == 0, num_warps=down.warps, num_stages=down.stages,
    )  # fmt: skip
    out = torch.empty_like(x)
    block = min(2048, next_power_of_2(hidden))
    _combine[(tokens, triton.cdiv(hidden, block))](
        parts, groups.place_of, weights, x if shared is None else shared, out, hidden, K=topk, SHARED=shared is not None, BLOCK=block, num_warps=4
    )
    return out
