"""One row of a vocabulary-parallel embedding, chosen by a token that only the device knows."""

from __future__ import annotations

import torch

from .triton_support import jit, let_next_start, overlap_options, tl, triton, wait_for_previous


def embed_row_eager(token: int, table: torch.Tensor, vocab_start: int) -> torch.Tensor:
    """Row of ``table [V/tp, H]`` that holds ``token``, zeros on ranks that do not hold it: ``[H]``, a summand of the embedding."""
    local = token - vocab_start
    return table[local] if 0 <= local < table.shape[0] else torch.zeros_like(table[0])


@jit
def _embed_row(token, table, out, vocab_start, rows, hidden, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    local = tl.load(token) - vocab_start
    mine = (local >= 0) & (local < rows)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    value = tl.load(table + local.to(tl.int64) * hidden + column, mask=inside & mine, other=0.0)
    tl.store(out + column, value, mask=inside)


def embed_row_triton(token: torch.Tensor, table: torch.Tensor, vocab_start: int, out: torch.Tensor) -> None:
    """As :func:`embed_row_eager` for ``token`` int32 ``[1]`` on the device, into ``out [H]``."""
    rows, hidden = table.shape
    _embed_row[(triton.cdiv(hidden, 1024),)](token, table, out, vocab_start, rows, hidden, BLOCK=1024, **overlap_options(table.device))
