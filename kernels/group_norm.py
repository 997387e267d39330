"""Group norm, scale and shift, SiLU: what stands before every convolution around the trunk, in fp32.

The fused kernels read a picture whose channels lie last, once for its statistics and once for the result, which is what the convolution wants.

Letters: B pictures, C channels, P = h·w pixels, G groups.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .triton_support import jit, next_power_of_2, tl, triton

NormSilu = Callable[..., torch.Tensor]
"""As :func:`norm_silu_eager`."""
GROUPS = 32
# Pixels of one program, in tiles of which one lies in registers.
PIXELS = 256
TILE = 32


def norm_silu_eager(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    modulation: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """``x [B, C, h, w]``, ``weight, bias [C]``, ``modulation`` = scale and shift ``[B, C]`` fp32 -> ``silu(norm · (1 + scale) + shift)`` in ``dtype``.

    Scale first, then shift; in fp32, so that 1 + scale is not rounded to bf16.
    """
    u = F.group_norm(x.float(), GROUPS, weight.float(), bias.float(), eps)
    if modulation is not None:
        scale, shift = (part[:, :, None, None] for part in modulation)
        u = u * (1 + scale) + shift
    return F.silu(u).to(dtype)


@jit
def _statistics(
    x, means, squares, pixels, batch_stride, pixel_stride, width,
    G: tl.constexpr, PAD: tl.constexpr, PIXELS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Mean and summed squared deviations of one group in ``PIXELS`` pixels, tile by tile: no difference of large sums."""
    group, chunk = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, PAD)[None, :]
    base = x + (group // G).to(tl.int64) * batch_stride + group % G * width
    count, mean, square = 0.0, 0.0, 0.0
    for first in range(chunk * PIXELS, tl.minimum((chunk + 1) * PIXELS, pixels), TILE):
        pixel = (first + tl.arange(0, TILE))[:, None]
        mask = (pixel < pixels) & (column < width)
        value = tl.load(base + pixel.to(tl.int64) * pixel_stride + column, mask=mask, other=0.0).to(tl.float32)
        new = (tl.minimum(pixels - first, TILE) * width).to(tl.float32)
        tile_mean = tl.sum(tl.sum(value, axis=1), axis=0) / new
        away = tl.where(mask, value - tile_mean, 0.0)
        total = count + new
        square += tl.sum(tl.sum(away * away, axis=1), axis=0) + (tile_mean - mean) * (tile_mean - mean) * count * new / total
        mean += (tile_mean - mean) * new / total
        count = total
    at = group * tl.num_programs(1) + chunk
    tl.store(means + at, mean)
    tl.store(squares + at, square)


@jit
def _apply(
    x, means, squares, weight, bias, scale, shift, out, pixels, batch_stride, pixel_stride, scale_stride, width, channels, chunks, eps,
    G: tl.constexpr, PAD: tl.constexpr, CHUNKS: tl.constexpr, PIXELS: tl.constexpr, TILE: tl.constexpr, MODULATED: tl.constexpr,
):  # fmt: skip
    group, chunk = tl.program_id(0), tl.program_id(1)
    part = tl.arange(0, CHUNKS)
    here = part < chunks
    count = tl.where(here, (tl.minimum(pixels - part * PIXELS, PIXELS) * width).to(tl.float32), 0.0)
    part_mean = tl.load(means + group * chunks + part, mask=here, other=0.0)
    elements = (pixels * width).to(tl.float32)
    mean = tl.sum(part_mean * count, axis=0) / elements
    away = part_mean - mean
    square = tl.sum(tl.load(squares + group * chunks + part, mask=here, other=0.0) + away * away * count, axis=0)
    factor = 1.0 / tl.sqrt(square / elements + eps)
    column = tl.arange(0, PAD)
    inside = column < width
    channel = group % G * width + column
    picture = (group // G).to(tl.int64)
    slope = factor * tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32) - mean * slope
    if MODULATED:
        by = 1.0 + tl.load(scale + picture * scale_stride + channel, mask=inside, other=0.0)
        slope *= by
        offset = offset * by + tl.load(shift + picture * scale_stride + channel, mask=inside, other=0.0)
    for first in range(chunk * PIXELS, tl.minimum((chunk + 1) * PIXELS, pixels), TILE):
        pixel = (first + tl.arange(0, TILE))[:, None].to(tl.int64)
        mask = (pixel < pixels) & inside[None, :]
        value = tl.load(x + picture * batch_stride + pixel * pixel_stride + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        value = value * slope[None, :] + offset[None, :]
        value *= tl.sigmoid(value)
        tl.store(out + (picture * pixels + pixel) * channels + channel[None, :], value.to(out.dtype.element_ty), mask=mask)


def norm_silu_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    modulation: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """As :func:`norm_silu_eager`; the result's channels lie last, and those of ``x`` are brought there if they do not."""
    pictures, channels, height, across = x.shape
    if x.stride(1) != 1 or x.stride(2) != across * x.stride(3):
        x = x.contiguous(memory_format=torch.channels_last)
    pixels, width = height * across, channels // GROUPS
    chunks = triton.cdiv(pixels, PIXELS)
    means, squares = torch.empty(2, pictures * GROUPS, chunks, dtype=torch.float32, device=x.device)
    out = torch.empty_strided(x.shape, (channels * pixels, 1, channels * across, channels), dtype=dtype, device=x.device)
    scale, shift = modulation or (means, means)
    sizes = {"G": GROUPS, "PAD": next_power_of_2(width), "PIXELS": PIXELS, "TILE": TILE, "num_warps": 4}
    _statistics[(pictures * GROUPS, chunks)](x, means, squares, pixels, x.stride(0), x.stride(3), width, **sizes)
    _apply[(pictures * GROUPS, chunks)](
        x, means, squares, weight, bias, scale, shift, out, pixels, x.stride(0), x.stride(3), scale.stride(0), width, channels, chunks, eps,
        CHUNKS=next_power_of_2(chunks), MODULATED=modulation is not None, **sizes,
    )  # fmt: skip
    return out
