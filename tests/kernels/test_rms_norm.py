"""RMSNorm against fp64."""

from __future__ import annotations

import pytest
import torch

from phase_parallel.kernels.rms_norm import rms_norm_eager


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows = []
    for row in x.double().reshape(-1, x.shape[-1]):
        rows.append(row / (sum(float(v) ** 2 for v in row) / len(row) + eps) ** 0.5 * weight.double())
    return torch.stack(rows).reshape(x.shape)


# The reason for each shape stands beside it.
SHAPES = [
    (1, 64),  # decode: one token
    (5, 64),  # an odd number of rows
    (3, 7),  # an odd width
    (2, 3, 16),  # per head
    (2, 4096),  # the release's width
    (4, 1),  # one element: the result is ±weight
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_against_fp64(shape: tuple[int, ...], scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * scale
    weight = torch.randn(shape[-1], generator=generator)
    torch.testing.assert_close(rms_norm_eager(x, weight, 1e-5).double(), reference(x, weight, 1e-5), rtol=2e-6, atol=1e-9)


def test_zero_row_stays_zero() -> None:
    assert torch.equal(rms_norm_eager(torch.zeros(2, 8), torch.ones(8), 1e-5), torch.zeros(2, 8))


def test_epsilon_counts() -> None:
    x = torch.full((1, 4), 1e-3)
    assert float(rms_norm_eager(x, torch.ones(4), 1e-5)[0, 0]) == pytest.approx(1e-3 / (1e-6 + 1e-5) ** 0.5, rel=1e-5)


def test_bf16_is_rounded_before_the_weight_is_applied() -> None:
    """The release's order (spec 3.1); rounding once at the end gives other bits."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(64, 128, generator=generator).bfloat16()
    weight = (1 + 0.3 * torch.randn(128, generator=generator)).bfloat16()
    normed = (x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)).float()
    got = rms_norm_eager(x, weight, 1e-5)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, normed.bfloat16() * weight)
    assert not torch.equal(got, (normed * weight.float()).bfloat16())


def test_wide_input_and_narrow_weight_give_a_wide_product() -> None:
    assert rms_norm_eager(torch.randn(2, 8), torch.ones(8).bfloat16(), 1e-5).dtype == torch.float32
