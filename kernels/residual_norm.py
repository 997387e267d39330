"""What follows every reduction: add to the residual stream, then the next RMSNorm; and that norm alone, for where the stream begins."""

from __future__ import annotations

import torch

from .rms_norm import rms_norm_eager
from .triton_support import jit, let_next_start, next_power_of_2, overlap_options, tl, wait_for_previous


def residual_norm_eager(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``x, residual [..., H]`` -> (``residual + x``, RMSNorm of it), both in residual's dtype."""
    total = residual + x
    return total, rms_norm_eager(total, weight, eps)


@jit
def _residual_norm(x, residual, weight, normed, eps, H: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr):
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * H
    column = tl.arange(0, BLOCK)
    inside = column < H
    wide = tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
        # The norm sees the rounded sum: it is what the residual stream holds.
        kept = wide.to(residual.dtype.element_ty)
        tl.store(residual + row + column, kept, mask=inside)
        wide = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)
    # Rounded before the multiply, as the release does (spec 3.1).
    scaled = (wide * scale).to(normed.dtype.element_ty).to(tl.float32)
    tl.store(normed + row + column, scaled * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32), mask=inside)


def residual_norm_triton(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, normed: torch.Tensor) -> None:
    """As :func:`residual_norm_eager` with ``residual`` updated in place and the norm in ``normed``. Rows of H contiguous values."""
    _launch(x, residual, weight, eps, normed, add=True)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As :func:`.rms_norm.rms_norm_eager` for contiguous ``x [..., H]``."""
    normed = torch.empty_like(x)
    _launch(x, x, weight, eps, normed, add=False)
    return normed


def _launch(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, normed: torch.Tensor, *, add: bool) -> None:
    hidden = residual.shape[-1]
    _residual_norm[(residual.numel() // hidden,)](
        x, residual, weight, normed, eps, H=hidden, BLOCK=next_power_of_2(hidden), ADD=add, num_warps=8 if hidden >= 2048 else 4,
        **overlap_options(x.device),
    )  # fmt: skip
