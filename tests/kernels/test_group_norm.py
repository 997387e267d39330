"""Group norm with scale, shift and SiLU against fp64."""

from __future__ import annotations

import pytest
import torch

from phase_parallel.kernels.group_norm import norm_silu_eager, norm_silu_triton

EPS = 1e-5


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def fp64(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, modulation: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    groups = x.double().unflatten(1, (32, -1))
    away = groups - groups.mean((2, 3, 4), keepdim=True)
    u = (away / (away.square().mean((2, 3, 4), keepdim=True) + EPS).sqrt()).flatten(1, 2)
    u = u * weight.double()[:, None, None] + bias.double()[:, None, None]
    if modulation is not None:
        u = u * (1 + modulation[0].double()[:, :, None, None]) + modulation[1].double()[:, :, None, None]
    return u / (1 + torch.exp(-u))


F32, BF16 = torch.float32, torch.bfloat16
LAST, FIRST, ROWS = "channels last", "channels first", "rows of a longer block"


@pytest.mark.parametrize(
    ("shape", "layout", "modulated", "dtype"),
    [
        ((1, 64, 4, 4), LAST, True, F32),
        ((1, 64, 4, 4), FIRST, True, BF16),
        ((2, 64, 3, 3), ROWS, False, BF16),  # two pictures, each behind tokens that are not its own
        ((2, 32, 5, 7), ROWS, True, F32),  # one channel a group, pixels that fill no tile
        ((1, 96, 17, 17), LAST, False, F32),  # three channels a group, two programs a group
        ((1, 1024, 3, 2), FIRST, False, F32),
    ],
)
def test_against_fp64(
    triton_device: torch.device, shape: tuple[int, int, int, int], layout: str, modulated: bool, dtype: torch.dtype
) -> None:
    pictures, channels, height, width = shape
    generator = torch.Generator().manual_seed(channels)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(triton_device)

    tokens = draw(pictures, height * width + 3, channels).to(dtype)
    x = tokens[:, 3:].transpose(1, 2).unflatten(2, (height, width))
    if layout != ROWS:
        x = x.contiguous(memory_format=torch.channels_last if layout == LAST else torch.contiguous_format)
    weight, bias, both = draw(channels).to(dtype), draw(channels).to(dtype), draw(pictures, 2 * channels)
    modulation = tuple(both.chunk(2, dim=1)) if modulated else None
    want = fp64(x, weight, bias, modulation)
    got = norm_silu_triton(x, weight, bias, EPS, torch.float32, modulation)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert relative(got, want) < 3e-6
    assert relative(norm_silu_eager(x, weight, bias, EPS, torch.float32, modulation), want) < 3e-6
    narrow = norm_silu_triton(x, weight, bias, EPS, torch.bfloat16, modulation)
    assert narrow.dtype == torch.bfloat16 and relative(narrow, want) < 1e-2


def test_a_large_mean_does_not_eat_the_deviations(triton_device: torch.device) -> None:
    x = 1000 + torch.randn(1, 32, 17, 17, generator=torch.Generator().manual_seed(1)).to(triton_device)
    weight, bias = torch.ones(32, device=triton_device), torch.zeros(32, device=triton_device)
    assert relative(norm_silu_triton(x, weight, bias, EPS, torch.float32), fp64(x, weight, bias, None)) < 1e-3


def test_one_order_of_every_sum(triton_device: torch.device) -> None:
    x = torch.randn(1, 64, 17, 17, generator=torch.Generator().manual_seed(1)).to(triton_device)
    weight, bias = torch.ones(64, device=triton_device), torch.zeros(64, device=triton_device)
    assert torch.equal(norm_silu_triton(x, weight, bias, EPS, x.dtype), norm_silu_triton(x, weight, bias, EPS, x.dtype))
