"""Rotary embedding followed by the per-head RMSNorm (this order, spec 3.3)."""

from __future__ import annotations

import torch

from .rms_norm import rms_norm_eager


def rope_norm_eager(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """``x [T, heads, d]`` any float dtype; ``cos, sin [T, d]`` fp32 with halves repeated; ``weight [d]``. Returns x's dtype.

    Rotation and norm run in fp32; the only rounding is the final cast.
    """
    wide = x.float()
    half = wide.shape[-1] // 2
    turned = torch.cat((-wide[..., half:], wide[..., :half]), dim=-1)
    rotated = wide * cos.unsqueeze(1) + turned * sin.unsqueeze(1)
    return rms_norm_eager(rotated, weight.float(), eps).to(x.dtype)
