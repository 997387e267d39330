"""RMSNorm, and rotation followed by the per-head norm, against fp64."""

from __future__ import annotations

import pytest
import torch

from phase_parallel.kernels.rms_norm import rms_norm_eager
from phase_parallel.kernels.rope_norm import rope_norm_eager

EPS = 1e-5


def norm_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 7), (17, 4096)])
def test_rms_norm(rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    # Small variances, so that the epsilon shows.
    x, weight = torch.randn(rows, width, generator=generator) * 1e-3, torch.rand(width, generator=generator) + 0.5
    got, expected = rms_norm_eager(x, weight, EPS), norm_reference(x, weight)
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


def test_rms_norm_rounds_before_the_weight() -> None:
    """In bf16 the normed value is rounded first and the product again (spec 3.1)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 32, generator=generator).bfloat16()
    weight = (torch.rand(32, generator=generator) + 0.5).bfloat16()
    rounded = norm_reference(x, torch.ones(32)).bfloat16()
    assert torch.equal(rms_norm_eager(x, weight, EPS), rounded * weight)


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 4), (5, 3, 16), (9, 8, 128)])
def test_rotation_comes_before_the_norm(tokens: int, heads: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(tokens, heads, dim, generator=generator)
    angle = torch.randn(tokens, dim // 2, generator=generator)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    weight = torch.rand(dim, generator=generator) + 0.5
    pairs = torch.complex(x[..., : dim // 2].double(), x[..., dim // 2 :].double())
    turned = pairs * torch.polar(torch.ones_like(angle).double(), angle.double()).unsqueeze(1)
    expected = norm_reference(torch.cat([turned.real, turned.imag], -1), weight)
    got = rope_norm_eager(x, cos, sin, weight, EPS)
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    normed_first = rope_norm_eager(rms_norm_eager(x, weight, EPS), cos, sin, torch.ones(dim), EPS)
    assert (got - normed_first).abs().max() > 1e-2
