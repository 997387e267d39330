"""Rotation, then the per-head norm, against complex numbers in fp64."""

from __future__ import annotations

import cmath

import pytest
import torch

from phase_parallel.kernels.rope_norm import rope_norm_eager


def reference(x: torch.Tensor, angles: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Element k and element k + d/2 are one complex number, turned by angle k."""
    tokens, heads, d = x.shape
    out = torch.zeros(tokens, heads, d, dtype=torch.float64)
    for t in range(tokens):
        for h in range(heads):
            for k in range(d // 2):
                turned = complex(x[t, h, k], x[t, h, k + d // 2]) * cmath.exp(1j * float(angles[t, k]))
                out[t, h, k], out[t, h, k + d // 2] = turned.real, turned.imag
    return out * (out.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize(
    ("tokens", "heads", "d"),
    [
        (1, 1, 8),  # decode with one KV head
        (1, 4, 16),  # decode, a group of query heads
        (7, 3, 16),  # odd numbers of tokens and heads
        (3, 2, 2),  # one pair
    ],
)
def test_against_complex_numbers(tokens: int, heads: int, d: int) -> None:
    generator = torch.Generator().manual_seed(tokens + d)
    x = torch.randn(tokens, heads, d, generator=generator)
    weight = torch.randn(d, generator=generator)
    angles = torch.rand(tokens, d // 2, generator=generator, dtype=torch.float64) * 300
    both = torch.cat((angles, angles), dim=-1)
    got = rope_norm_eager(x, both.cos().float(), both.sin().float(), weight, 1e-5)
    torch.testing.assert_close(got.double(), reference(x, angles, weight, 1e-5), rtol=1e-5, atol=1e-6)


def test_norm_comes_after_the_rotation() -> None:
    """With a weight that differs between the halves, the other order gives another result."""
    x = torch.tensor([[[1.0, 0.0]]])
    weight = torch.tensor([1.0, 3.0])
    quarter = torch.tensor([[torch.pi / 2, torch.pi / 2]])
    got = rope_norm_eager(x, quarter.cos(), quarter.sin(), weight, 0.0)
    assert torch.allclose(got, torch.tensor([[[0.0, 3.0 * 2**0.5]]]), atol=1e-6)


def test_no_rotation_is_the_norm_alone() -> None:
    x, weight = torch.randn(2, 3, 8), torch.randn(8)
    got = rope_norm_eager(x, torch.ones(2, 8), torch.zeros(2, 8), weight, 1e-5)
    torch.testing.assert_close(got, torch.nn.functional.rms_norm(x, (8,), weight, 1e-5))


def test_bf16_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(9, 2, 16, generator=generator).bfloat16()
    weight = torch.randn(16, generator=generator).bfloat16()
    angles = torch.rand(9, 8, generator=generator) * 50
    both = torch.cat((angles, angles), dim=-1)
    got = rope_norm_eager(x, both.cos(), both.sin(), weight, 1e-5)
    wide = rope_norm_eager(x.float(), both.cos(), both.sin(), weight.float(), 1e-5)
    assert got.dtype == torch.bfloat16 and torch.equal(got, wide.bfloat16())
