"""A vector of which each rank makes a part, whole in every rank's memory: the matrix product writes its rows to all ranks, then the ranks meet.

Each rank owns a block that its peers can write: a counter for each rank (:data:`.peer_reduce.HEADER_WORDS`), then ``[V]`` fp32. Nothing is doubled as in
:mod:`.peer_reduce`: between two gathers the ranks meet in reductions, so nobody still reads the values of the gather before.

Letters: R rows of this rank's part of the matrix, C columns, V rows of all parts.
"""

from __future__ import annotations

import torch

from .gemv import ELEMENTS_PER_THREAD, LONGEST_TILE, gemv_eager, load_tile, load_vector
from .peer_reduce import HEADER_WORDS, LOOK_NS, Mailboxes, meet
from .triton_support import jit, let_next_start, next_power_of_2, overlap_options, tl, triton, wait_for_previous

WARPS = 4


def gather_bytes(values: int) -> int:
    return HEADER_WORDS * 4 + values * 4


def gathered(block: torch.Tensor) -> torch.Tensor:
    """The values in a rank's own ``block`` uint8 -> ``[V]`` fp32, the same memory."""
    return block[HEADER_WORDS * 4 :].view(torch.float32)


def gemv_gather_eager(x: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """``x [C]``, each rank's ``[R, C]`` in rank order -> ``[V]`` fp32."""
    return torch.cat([gemv_eager(x, part, torch.float32) for part in parts])


@jit
def _gemv_to_all(
    x, weight, boxes, first, rows, row_stride,
    columns: tl.constexpr, EVEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, RANKS: tl.constexpr, HEADER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = (row < rows)[:, None]
    base = weight + row.to(tl.int64)[:, None] * row_stride
    tile = load_tile(base, tl.arange(0, BLOCK_C), inside, columns, EVEN)
    wait_for_previous(OVERLAP)
    total = tile.to(tl.float32) * load_vector(x, tl.arange(0, BLOCK_C), columns, EVEN)[None, :]
    for start in tl.static_range(BLOCK_C, columns, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        total += load_tile(base, column, inside, columns, EVEN).to(tl.float32) * load_vector(x, column, columns, EVEN)[None, :]
    result = tl.sum(total, axis=1)
    for peer in tl.static_range(RANKS):
        theirs = (tl.load(boxes + peer) + HEADER * 4).to(tl.pointer_type(tl.float32))
        tl.store(theirs + first + row, result, mask=row < rows)


# As for the reductions: one binary for all ranks and timeouts.
@jit(do_not_specialize=("rank", "timeout_ns"))
def _meet_once(
    boxes, calls, failed, abort, timeout_ns, rank, RANKS: tl.constexpr, PAD: tl.constexpr, LOOK_NS: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    let_next_start(OVERLAP)
    # The product's programs have ended and their rows are on their way; the counters follow them.
    wait_for_previous(OVERLAP)
    call = tl.load(calls) + 1
    patience = tl.where(tl.load(failed) != 0, 0, timeout_ns)
    if meet(boxes, rank, call, patience, abort, RANKS, PAD, LOOK_NS) == 0:
        tl.store(failed, 1)
    tl.store(calls, call)


def gemv_gather(boxes: Mailboxes, x: torch.Tensor, weight: torch.Tensor, first: int, *, timeout_s: float) -> None:
    """As :func:`gemv_gather_eager`; this rank's ``weight [R, C]`` makes rows ``first …`` of the vector in every rank's block of ``boxes``.

    A peer that does not come is told as in :func:`.peer_reduce.reduce_residual_norm`.
    """
    rows, columns = weight.shape
    if weight.stride(1) != 1:
        raise ValueError(f"gemv needs contiguous columns, but the weight's strides are {weight.stride()}")
    ranks = boxes.addresses.shape[0]
    block_c = min(LONGEST_TILE, next_power_of_2(columns))
    block_r = max(1, ELEMENTS_PER_THREAD * WARPS * 32 // block_c)
    _gemv_to_all[(triton.cdiv(rows, block_r),)](
        x, weight, boxes.addresses, first, rows, weight.stride(0),
        columns=columns, EVEN=columns % block_c == 0 and rows % block_r == 0, BLOCK_R=block_r, BLOCK_C=block_c, RANKS=ranks, HEADER=HEADER_WORDS,
        num_warps=WARPS, **overlap_options(x.device),
    )  # fmt: skip
    _meet_once[(1,)](
        boxes.addresses, boxes.calls, boxes.failed, boxes.abort, int(timeout_s * 1e9), boxes.rank, RANKS=ranks, PAD=next_power_of_2(ranks),
        LOOK_NS=LOOK_NS, num_warps=1, **overlap_options(x.device),
    )  # fmt: skip
