"""Matrix times one vector: the projections of a decode step. Bytes of the matrix set the time.

Letters: R rows of the matrix, C columns.
"""

from __future__ import annotations

import torch

from .triton_support import jit, let_next_start, next_power_of_2, overlap_options, tl, triton, wait_for_previous

# Elements of a matrix that one thread loads before it needs the vector: enough bytes under way to fill the device.
ELEMENTS_PER_THREAD = 64
LONGEST_TILE = 4096


def gemv_eager(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """``x [C]``, ``weight [R, C]`` (rows may be strided) -> ``[R]``, summed in fp32 and rounded once to ``out_dtype`` (default x's)."""
    return (weight.float() @ x.float()).to(out_dtype or x.dtype)


@jit
def load_tile(base, column, inside_rows, columns: tl.constexpr, EVEN: tl.constexpr):
    """``[R, BLOCK]`` of a matrix whose rows begin at ``base [R, 1]``; no mask where none is needed."""
    if EVEN:
        return tl.load(base + column[None, :])
    return tl.load(base + column[None, :], mask=inside_rows & (column < columns)[None, :], other=0.0)


@jit
def load_vector(x, column, columns: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(x + column).to(tl.float32)
    return tl.load(x + column, mask=column < columns, other=0.0).to(tl.float32)


@jit
def _gemv(
    x, weight, out, plus, rows, row_stride,
    columns: tl.constexpr, EVEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PLUS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = (row < rows)[:, None]
    base = weight + row.to(tl.int64)[:, None] * row_stride
    # The first tile is under way before the kernel that makes x has ended.
    tile = load_tile(base, tl.arange(0, BLOCK_C), inside, columns, EVEN)
    wait_for_previous(OVERLAP)
    total = tile.to(tl.float32) * load_vector(x, tl.arange(0, BLOCK_C), columns, EVEN)[None, :]
    for first in tl.static_range(BLOCK_C, columns, BLOCK_C):
        column = first + tl.arange(0, BLOCK_C)
        total += load_tile(base, column, inside, columns, EVEN).to(tl.float32) * load_vector(x, column, columns, EVEN)[None, :]
    result = tl.sum(total, axis=1)
    if PLUS:
        result += tl.load(plus + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out + row, result, mask=row < rows)


def gemv_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    plus: torch.Tensor | None = None,
    block_r: int | None = None,
    block_c: int | None = None,
    warps: int = 4,
) -> torch.Tensor:
    """As :func:`gemv_eager` into ``out [R]``, with ``plus [R]`` added before the rounding. Columns must be contiguous; rows may be strided."""
    rows, columns = weight.shape
    if weight.stride(1) != 1:
        raise ValueError(f"gemv needs contiguous columns, but the weight's strides are {weight.stride()}")
    block_c = block_c or min(LONGEST_TILE, next_power_of_2(columns))
    block_r = block_r or max(1, ELEMENTS_PER_THREAD * warps * 32 // block_c)
    _gemv[(triton.cdiv(rows, block_r),)](
        x, weight, out, x if plus is None else plus, rows, weight.stride(0),
        columns=columns, EVEN=columns % block_c == 0 and rows % block_r == 0, BLOCK_R=block_r, BLOCK_C=block_c, PLUS=plus is not None,
        num_warps=warps, **overlap_options(x.device),
    )  # fmt: skip
    return out
