"""Tokens copied into the order of their experts: once, instead of gathered by every program that multiplies them."""

from __future__ import annotations

import torch

from .triton_support import jit, next_power_of_2, tl, triton


@jit
def _sort_rows(x, place_of, out, zeroed, hidden, x_stride, K: tl.constexpr, BLOCK: tl.constexpr, ZEROS: tl.constexpr):
    # One program reads a token once and writes it K times: each write is independent of the others.
    token = tl.program_id(0)
    if ZEROS:
        counter = tl.arange(0, ZEROS)
        tl.store(zeroed + counter, tl.zeros([ZEROS], tl.int32), mask=counter < tl.where(token == 0, ZEROS, 0))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(x + token.to(tl.int64) * x_stride + column, mask=column < hidden)
    for choice in tl.static_range(K):
        place = tl.load(place_of + token * K + choice).to(tl.int64)
        tl.store(out + place * hidden + column, row, mask=column < hidden)


def sort_rows(x: torch.Tensor, place_of: torch.Tensor, topk: int, zeroed: torch.Tensor | None = None) -> torch.Tensor:
    """``x [T, H]``, ``place_of [N]`` int32: the place of each pair (token · K + choice) in the order wanted -> their tokens ``[N, H]``.

    ``zeroed``: int32 counters, a power of 2 of them, that the kernels behind this one count from 0.
    """
    tokens, hidden = x.shape
    out = torch.empty(tokens * topk, hidden, dtype=x.dtype, device=x.device)
    block = min(4096, next_power_of_2(hidden))
    _sort_rows[(tokens, triton.cdiv(hidden, block))](
        x, place_of, out, zeroed, hidden, x.stride(0), K=topk, BLOCK=block, ZEROS=0 if zeroed is None else zeroed.shape[0], num_warps=8
    )
    return out
