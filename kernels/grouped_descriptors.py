"""Grouped products whose tiles the copy engine of sm_90 fetches through tensor descriptors: fewer instructions for addresses, deeper pipelines.

Letters as in :mod:`.grouped_experts`. Needs whole tiles of columns, 16-bit weights and rows at multiples of 16 bytes; everything else runs through
:mod:`.grouped_pointers`.
"""

from __future__ import annotations

import torch

from .expert_groups import Groups
from .expert_views import MicroViews, WeightRows, matrices
from .grouped_tiles import Tile, find_tile, tiles_at_most
from .sorted_rows import sort_rows
from .triton_support import interpreting, jit, next_power_of_2, tl

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton is missing or older than descriptors
    TensorDescriptor = None

UP = Tile(128, 128, 64, 8, 4)
DOWN = Tile(128, 256, 64, 8, 4)
# A tile's tokens lie scattered. Copying them into order once is cheaper than gathering them in every program from this many column blocks on
# (H200: 12 blocks -11 %, 6 blocks +10 %).
SORTED_FROM = 12


@jit
def _up_by_descriptors(
    x, x_sorted, row_of, ends, w1, out, experts, width, expert_rows, micro_rows, x_stride,
    hidden: tl.constexpr, micros: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SORTED: tl.constexpr,
):  # fmt: skip
    expert, first, last = find_tile(ends, experts, E, BM)
    if expert < experts:
        blocks = width // BN
        micro, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
        place = first + tl.arange(0, BM)
        if not SORTED:
            token = tl.load(row_of + place, mask=place < last, other=0) // K
            a = x + token.to(tl.int64)[:, None] * x_stride + tl.arange(0, BK)[None, :]
        row = expert * expert_rows + micro * micro_rows + block * BN
        up = tl.zeros([BM, BN], tl.float32)
        gate = tl.zeros([BM, BN], tl.float32)
        for start in range(0, hidden, BK):
            # A sorted tile may reach into the next expert's rows: they are computed and not stored.
            rows = x_sorted.load([first, start]) if SORTED else tl.load(a + start)
            up = tl.dot(rows, w1.load([row, start]).T, up, input_precision="ieee")
            gate = tl.dot(rows, w1.load([row + width, start]).T, gate, input_precision="ieee")
        result = up * gate * tl.sigmoid(gate)
        column = block * BN + tl.arange(0, BN)
        to = out + place.to(tl.int64)[:, None] * (micros * width) + micro * width + column[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=(place < last)[:, None])


@jit
def _down_by_descriptors(
    act, ends, w2, out, experts, hidden, expert_rows, micro_rows, micro_columns,
    width: tl.constexpr, micros: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    expert, first, last = find_tile(ends, experts, E, BM)
    if expert < experts:
        row = expert * expert_rows + tl.program_id(0) * BN
        total = tl.zeros([BM, BN], tl.float32)
        for step in range(micros * (width // BK)):
            micro, inner = step // (width // BK), step % (width // BK) * BK
            weights = w2.load([row + micro * micro_rows, micro * micro_columns + inner])
            total = tl.dot(act.load([first, step * BK]), weights.T, total, input_precision="ieee")
        place = first + tl.arange(0, BM)
        column = tl.program_id(0) * BN + tl.arange(0, BN)
        to = out + place.to(tl.int64)[:, None] * hidden + column[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=(place < last)[:, None])


def descriptors_fit(views: MicroViews, *, up: Tile = UP, down: Tile = DOWN) -> bool:
    """Whether both products can run here: sm_90 on, 16-bit values (fp32 in Triton's interpreter), whole tiles, aligned rows."""
    w1, w2 = matrices(views)
    if TensorDescriptor is None or w1 is None or w2 is None or not (w1.aligned and w2.aligned):
        return False
    hidden = views.w1.shape[2]
    whole = hidden % up.depth == 0 and views.width % up.columns == 0 and views.width % down.depth == 0 and hidden % down.columns == 0
    if interpreting():
        return whole
    return whole and views.w1.element_size() == 2 and torch.cuda.get_device_capability(views.w1.device) >= (9, 0)


def _descriptor(rows: WeightRows, tile: Tile) -> TensorDescriptor:
    return TensorDescriptor(rows.base, [rows.rows, rows.columns], [rows.row_stride, 1], [tile.columns, tile.depth])


def experts_by_descriptors(x: torch.Tensor, views: MicroViews, groups: Groups, experts: int, topk: int, *, up: Tile = UP, down: Tile = DOWN) -> torch.Tensor:
    """``x [T, H]`` -> each pair's output of its expert, in the groups' order, ``[N, H]``. ``descriptors_fit`` must hold for the tiles."""
    hidden, pairs, inner = x.shape[1], groups.row_of.shape[0], views.micros * views.width
    padded = next_power_of_2(experts)
    w1, w2 = matrices(views)
    act = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    column_blocks = inner // up.columns
    in_order = column_blocks >= SORTED_FROM
    # The tokens in order are dead once the first product is done: the outputs take their place.
    parts = sort_rows(x, groups.place_of, topk) if in_order else torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    x_sorted = TensorDescriptor(parts, [pairs, hidden], [hidden, 1], [up.rows, up.depth]) if in_order else None
    _up_by_descriptors[(column_blocks, tiles_at_most(pairs, experts, up))](
        x, x_sorted, groups.row_of, groups.ends, _descriptor(w1, up), act, experts, views.width, w1.expert_rows, w1.micro_rows, x.stride(0),
        hidden=hidden, micros=views.micros, E=padded, K=topk, BM=up.rows, BN=up.columns, BK=up.depth, SORTED=in_order,
        num_warps=up.warps, num_stages=up.stages,
    )  # fmt: skip
    act_rows = TensorDescriptor(act, [pairs, inner], [inner, 1], [down.rows, down.depth])
    _down_by_descriptors[(hidden // down.columns, tiles_at_most(pairs, experts, down))](
        act_rows, groups.ends, _descriptor(w2, down), parts, experts, hidden, w2.expert_rows, w2.micro_rows, w2.micro_columns,
        width=views.width, micros=views.micros, E=padded, BM=down.rows, BN=down.columns, BK=down.depth,
        num_warps=down.warps, num_stages=down.stages,
    )  # fmt: skip
    return parts
