"""Rotary embedding followed by the per-head RMSNorm (this order, spec 3.3)."""

from __future__ import annotations

import torch

from .rms_norm import rms_norm_eager
from .triton_support import jit, next_power_of_2, tl


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


def rotate_into_eager(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query_norm: torch.Tensor,
    key_norm: torch.Tensor,
    eps: float,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> torch.Tensor:
    """``qkv [T, G, g+2, d]`` (g queries, key, value per KV group, spec 3.2) -> ``q [T, G·g, d]``; keys and values go to ``k_out, v_out [T, G, d]``."""
    g = qkv.shape[2] - 2
    k_out.copy_(rope_norm_eager(qkv[:, :, g], cos, sin, key_norm, eps))
    v_out.copy_(qkv[:, :, g + 1])
    return rope_norm_eager(qkv[:, :, :g].flatten(1, 2), cos, sin, query_norm, eps)


@jit
def _rotate_into(
    qkv, cos, sin, query_norm, key_norm, q_out, k_out, v_out, eps, qkv_row, qkv_group, k_row, k_head, v_row, v_head, groups,
    g: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, PAD)[None, :]
    inside = column < D
    first_half = column < D // 2
    partner = tl.where(first_half, column + D // 2, column - D // 2)
    base = qkv + token * qkv_row + group * qkv_group + head * D
    mask = (head < g + 2) & inside
    value = tl.load(base + column, mask=mask, other=0.0)
    turned = tl.load(base + partner, mask=mask, other=0.0).to(tl.float32)
    wide = value.to(tl.float32)
    rope = token * D + column
    rotated = wide * tl.load(cos + rope, mask=inside, other=0.0)
    rotated += tl.where(first_half, -turned, turned) * tl.load(sin + rope, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(rotated * rotated, axis=1, keep_dims=True) / D + eps)
    q_weight = tl.load(query_norm + column, mask=inside, other=0.0).to(tl.float32)
    k_weight = tl.load(key_norm + column, mask=inside, other=0.0).to(tl.float32)
    normed = rotated * scale * tl.where(head < g, q_weight, k_weight)
    place = ((token * groups + group) * g + head) * D + column
    tl.store(q_out + place, normed.to(q_out.dtype.element_ty), mask=(head < g) & inside)
    # One row of the tile is the key, the next one the value; the others are masked off.
    tl.store(k_out + token * k_row + group * k_head + column + head * 0, normed.to(k_out.dtype.element_ty), mask=(head == g) & inside)
    tl.store(v_out + token * v_row + group * v_head + column + head * 0, value.to(v_out.dtype.element_ty), mask=(head == g + 1) & inside)


def rotate_into_triton(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query_norm: torch.Tensor,
    key_norm: torch.Tensor,
    eps: float,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> torch.Tensor:
    """As :func:`rotate_into_eager`. Rows and groups of ``qkv`` and rows and heads of the outputs may be strided; d is contiguous everywhere."""
    tokens, groups, rows, d = qkv.shape
    q = torch.empty(tokens, groups * (rows - 2), d, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    if qkv.stride(3) != 1 or qkv.stride(2) != d or k_out.stride(2) != 1 or v_out.stride(2) != 1:
        raise ValueError("rotate_into needs contiguous heads")
    _rotate_into[(tokens, groups)](
        qkv, cos, sin, query_norm, key_norm, q, k_out, v_out, eps, qkv.stride(0), qkv.stride(1), k_out.stride(0), k_out.stride(1), v_out.stride(0),
        v_out.stride(1), groups, g=rows - 2, D=d, PAD=next_power_of_2(d), HEADS=next_power_of_2(rows), num_warps=2,
    )  # fmt: skip
    return q
