"""Routing, and the three ways to run the experts, against a slow fp64 loop."""

from __future__ import annotations

import pytest
import torch

from phase_parallel.kernels.moe import ExpertBlock, gated_unit_eager, moe_eager, permute_eager
from phase_parallel.kernels.router import route_eager, router_logits_eager


def reference(x: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Token by token. up, gate [E, I, H], down [E, H, I]."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            row = x[token].double()
            gated = gate[expert].double() @ row
            hidden = (up[expert].double() @ row) * gated / (1 + torch.exp(-gated))
            out[token] += weight * (down[expert].double() @ hidden)
    return out


def micro_major(up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor, micros: int) -> tuple[ExpertBlock, ...]:
    width = up.shape[1] // micros
    parts = [slice(m * width, (m + 1) * width) for m in range(micros)]
    return tuple(ExpertBlock(torch.cat([up[:, p], gate[:, p]], 1), down[:, :, p], 1) for p in parts)


def expert_major(up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor, micros: int) -> tuple[ExpertBlock, ...]:
    blocks = micro_major(up, gate, down, micros)
    return (ExpertBlock(torch.cat([b.w1 for b in blocks], 1), torch.cat([b.w2 for b in blocks], 2), micros),)


def route(pattern: str, tokens: int, experts: int, topk: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    if pattern == "one expert takes all":
        return torch.stack([torch.arange(topk)] * tokens)
    if pattern == "half of the experts are empty":
        return torch.stack([torch.randperm(max(topk, experts // 2), generator=generator)[:topk] for _ in range(tokens)])
    return torch.stack([torch.randperm(experts, generator=generator)[:topk] for _ in range(tokens)])


@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "topk", "width", "micros"),
    [
        (1, 16, 8, 3, 12, 1),  # decode
        (13, 24, 7, 2, 10, 2),  # prime expert count, odd tokens
        (5, 8, 4, 4, 8, 4),  # every token to every expert
        (40, 32, 64, 8, 16, 2),  # the release's routing
    ],
)
@pytest.mark.parametrize("pattern", ["uniform", "one expert takes all", "half of the experts are empty"])
def test_all_paths_equal_the_loop(tokens: int, hidden: int, experts: int, topk: int, width: int, micros: int, pattern: str) -> None:
    generator = torch.Generator().manual_seed(hidden)
    x = torch.randn(tokens, hidden, generator=generator)
    up, gate = torch.randn(2, experts, width, hidden, generator=generator) / hidden**0.5
    down = torch.randn(experts, hidden, width, generator=generator) / width**0.5
    ids = route(pattern, tokens, experts, topk)
    weights = torch.rand(tokens, topk, generator=generator)
    expected = reference(x, up, gate, down, weights, ids)
    results = {
        "multi_micro": moe_eager(x, micro_major(up, gate, down, micros), weights, ids, path="multi_micro"),
        "two_dispatch": moe_eager(x, micro_major(up, gate, down, micros), weights, ids, path="two_dispatch"),
        "expert_major": moe_eager(x, expert_major(up, gate, down, micros), weights, ids, path="multi_micro"),
    }
    for name, got in results.items():
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max(), name


def test_expert_weights_may_be_strided_views() -> None:
    """In prefill and decode an expert_major rank reads a micro view whose experts are not contiguous."""
    generator = torch.Generator().manual_seed(3)
    x, (up, gate) = torch.randn(6, 8, generator=generator), torch.randn(2, 4, 6, 8, generator=generator)
    down = torch.randn(4, 8, 6, generator=generator)
    whole = expert_major(up, gate, down, 2)[0]
    view = ExpertBlock(whole.w1.narrow(1, 6, 6), whole.w2.narrow(2, 3, 3), 1)
    assert not view.w1.is_contiguous() and not view.w2.is_contiguous()
    ids, weights = route("uniform", 6, 4, 2), torch.rand(6, 2, generator=generator)
    expected = reference(x, up[:, 3:], gate[:, 3:], down[:, :, 3:], weights, ids)
    got = moe_eager(x, (view,), weights, ids, path="multi_micro")
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_second_half_is_the_activated_one() -> None:
    up, gate = torch.tensor([[2.0]]), torch.tensor([[3.0]])
    got = gated_unit_eager(torch.cat([up, gate], -1), 1)
    assert torch.allclose(got, up * torch.nn.functional.silu(gate))
    assert not torch.allclose(got, gate * torch.nn.functional.silu(up))


def test_the_permutation_is_stable_and_counts_every_copy() -> None:
    permutation = permute_eager(torch.tensor([[2, 0], [0, 2], [5, 0]]), 6)
    assert permutation.counts.tolist() == [3, 0, 2, 0, 0, 1]
    assert permutation.token.tolist() == [0, 1, 2, 0, 1, 2]


def test_router_is_fp32_and_normalises_over_all_experts() -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(9, 32, generator=generator).bfloat16(), torch.randn(8, 32, generator=generator)
    logits = router_logits_eager(x, weight)
    assert logits.dtype == torch.float32
    assert torch.allclose(logits.double(), x.double() @ weight.double().T, atol=1e-4)
    weights, ids = route_eager(logits, 3)
    top = logits.double().softmax(-1).topk(3)
    assert torch.equal(ids, top.indices)
    assert torch.allclose(weights.double(), top.values / top.values.sum(-1, keepdim=True), atol=1e-6)
    assert (weights[:, :-1] >= weights[:, 1:]).all()
