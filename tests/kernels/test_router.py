"""Top-k routing against a loop in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from phase_parallel.kernels.router import route_eager, router_logits_eager


def reference(logits: torch.Tensor, topk: int) -> tuple[list[list[float]], list[list[int]]]:
    all_weights, all_ids = [], []
    for row in logits.double().tolist():
        order = sorted(range(len(row)), key=lambda expert: -row[expert])[:topk]
        chosen = [math.exp(row[expert] - row[order[0]]) for expert in order]
        all_weights.append([value / sum(chosen) for value in chosen])
        all_ids.append(order)
    return all_weights, all_ids


@pytest.mark.parametrize(
    ("tokens", "experts", "topk"),
    [
        (1, 64, 8),  # decode in the release
        (5, 8, 3),  # the golden checkpoints
        (7, 5, 1),  # one expert a token: its weight is 1
        (3, 4, 4),  # every expert
    ],
)
@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
def test_against_a_loop(tokens: int, experts: int, topk: int, scale: float) -> None:
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(experts)) * scale
    weights, ids = route_eager(logits, topk)
    wanted_weights, wanted_ids = reference(logits, topk)
    assert ids.tolist() == wanted_ids and ids.dtype == torch.int64
    wanted = torch.tensor(wanted_weights, dtype=torch.float64).reshape(tokens, topk)
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=1e-7)
    assert weights.dtype == torch.float32
    assert torch.allclose(weights.sum(-1), torch.ones(tokens))


def test_logits_are_fp32_from_any_input() -> None:
    generator = torch.Generator().manual_seed(4)
    x, weight = torch.randn(3, 16, generator=generator).bfloat16(), torch.randn(8, 16, generator=generator)
    got = router_logits_eager(x, weight)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


def test_wide_gap_gives_no_nan() -> None:
    weights, ids = route_eager(torch.tensor([[0.0, -1e4, 1e4, -1e4]]), 2)
    assert ids[0, 0] == 2 and torch.equal(weights, torch.tensor([[1.0, 0.0]]))
