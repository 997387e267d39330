"""Grouped products that compute every address themselves: any width, stride and dtype, from sm_80 on. Letters as in :mod:`.grouped_experts`."""

from __future__ import annotations

import torch

from .expert_groups import Groups
from .expert_views import MicroViews
from .grouped_tiles import Tile, find_tile, tiles_at_most
from .triton_support import jit, next_power_of_2, tl, triton


@jit
def _up_by_pointers(
    x, row_of, ends, w1, out, experts, width, expert_stride, row_stride, micro_stride, x_stride,
    hidden: tl.constexpr, micros: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    expert, first, last = find_tile(ends, experts, E, BM)
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
def _down_by_pointers(
    act, ends, w2, out, experts, hidden, expert_stride, row_stride, micro_stride,
    width: tl.constexpr, micros: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    expert, first, last = find_tile(ends, experts, E, BM)
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


def experts_by_pointers(x: torch.Tensor, views: MicroViews, groups: Groups, experts: int, topk: int) -> torch.Tensor:
    """``x [T, H]`` -> each pair's output of its expert, in the groups' order, ``[N, H]``."""
    hidden, pairs = x.shape[1], groups.row_of.shape[0]
    act = torch.empty(pairs, views.micros * views.width, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    padded = next_power_of_2(experts)
    up, down = choose_tiles(pairs, experts, views.width, hidden, x.element_size())
    _up_by_pointers[(views.micros * triton.cdiv(views.width, up.columns), tiles_at_most(pairs, experts, up))](
        x, groups.row_of, groups.ends, views.w1, act, experts, views.width, views.w1.stride(0), views.w1.stride(1), views.w1_micro_stride, x.stride(0),
        hidden=hidden, micros=views.micros, E=padded, K=topk, BM=up.rows, BN=up.columns, BK=up.depth,
        EVEN=hidden % up.depth == 0 and views.width % up.columns == 0, num_warps=up.warps, num_stages=up.stages,
    )  # fmt: skip
    _down_by_pointers[(triton.cdiv(hidden, down.columns), tiles_at_most(pairs, experts, down))](
        act, groups.ends, views.w2, parts, experts, hidden, views.w2.stride(0), views.w2.stride(1), views.w2_micro_stride,
        width=views.width, micros=views.micros, E=padded, BM=down.rows, BN=down.columns, BK=down.depth,
        EVEN=views.width % down.depth == 0 and hidden % down.columns == 0, num_warps=down.warps, num_stages=down.stages,
    )  # fmt: skip
    return parts
