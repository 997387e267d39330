"""RMSNorm over the last dim."""

from __future__ import annotations

import torch


def rms_norm_eager(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x [..., D]``, ``weight [D]``. Computed in fp32, cast to x's dtype *before* the multiply, as the release does (spec 3.1)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight
