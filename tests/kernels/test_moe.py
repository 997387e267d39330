"""Routed experts against a loop over tokens in fp64, for both weight layouts and both paths."""

from __future__ import annotations

import pytest
import torch

from phase_parallel.kernels.moe import ExpertBlock, finalize_eager, gated_unit_eager, grouped_experts_eager, moe_eager, permute_eager

# tokens, hidden, experts, top-k, width of a micro shard, micro shards, and why.
SHAPES = {
    "decode, one token": (1, 16, 8, 3, 6, 2),
    "one micro shard": (5, 16, 8, 3, 12, 1),
    "odd sizes": (7, 5, 3, 2, 3, 2),
    "four micro shards": (6, 8, 4, 2, 2, 4),
    "all experts for each token": (4, 8, 3, 3, 4, 2),
    "one expert a token": (9, 8, 5, 1, 4, 2),
    "more experts than copies": (2, 8, 32, 2, 4, 2),
    "prime number of experts": (13, 24, 7, 2, 5, 2),
    "the release's routing": (40, 32, 64, 8, 8, 2),
}


class Weights:
    """Full experts as in the checkpoint, and the same weights in both resident layouts."""

    def __init__(self, hidden: int, experts: int, width: int, micros: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        full = width * micros
        self.up, self.gate = (torch.randn(experts, full, hidden, generator=generator) for _ in range(2))
        self.down = torch.randn(experts, hidden, full, generator=generator)
        ups, gates, downs = self.up.chunk(micros, 1), self.gate.chunk(micros, 1), self.down.chunk(micros, 2)
        w1 = torch.stack([torch.cat(pair, dim=1) for pair in zip(ups, gates, strict=True)])  # [M, E, 2I, H]
        w2 = torch.stack(downs)  # [M, E, H, I]
        self.micro_major = tuple(ExpertBlock(w1[m], w2[m], 1) for m in range(micros))
        self.expert_major = (ExpertBlock(torch.cat(list(w1), dim=1), torch.cat(list(w2), dim=2), micros),)
        # One micro shard inside expert_major: strided, as decode uses it.
        block, rows = self.expert_major[0], 2 * width
        self.strided = tuple(
            ExpertBlock(block.w1.narrow(1, m * rows, rows), block.w2.narrow(2, m * width, width), 1) for m in range(micros)
        )


def routing(tokens: int, experts: int, topk: int, pattern: str = "any") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    some = max(topk, experts // 2) if pattern == "half of the experts are empty" else experts
    ids = torch.stack([torch.randperm(some, generator=generator)[:topk] for _ in range(tokens)])
    if pattern == "the same experts for all tokens":
        ids = ids[:1].expand(tokens, topk).contiguous()
    weights = torch.rand(tokens, topk, generator=generator) + 0.1
    return weights / weights.sum(-1, keepdim=True), ids


def reference(x: torch.Tensor, w: Weights, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for weight, expert in zip(weights[t].tolist(), ids[t].tolist(), strict=True):
            row = x[t].double()
            gate = w.gate[expert].double() @ row
            hidden = (w.up[expert].double() @ row) * gate / (1 + torch.exp(-gate))
            out[t] += weight * (w.down[expert].double() @ hidden)
    return out


@pytest.mark.parametrize("pattern", ["any", "half of the experts are empty", "the same experts for all tokens"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_layouts_and_paths_against_a_loop(shape: tuple[int, ...], pattern: str) -> None:
    tokens, hidden, experts, topk, width, micros = shape
    w = Weights(hidden, experts, width, micros)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(9))
    weights, ids = routing(tokens, experts, topk, pattern)
    wanted = reference(x, w, weights, ids)
    results = {
        "multi_micro": moe_eager(x, w.micro_major, weights, ids, path="multi_micro"),
        "two_dispatch": moe_eager(x, w.micro_major, weights, ids, path="two_dispatch"),
        "expert_major": moe_eager(x, w.expert_major, weights, ids, path="multi_micro"),
        "sum of strided micro shards": sum(moe_eager(x, (block,), weights, ids, path="multi_micro") for block in w.strided),
    }
    for name, got in results.items():
        assert got.shape == x.shape and got.dtype == x.dtype, name
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("chosen", [0, 2, 4], ids=["first", "middle", "last"])
def test_one_expert_takes_all(chosen: int) -> None:
    w = Weights(8, 5, 4, 2)
    x = torch.randn(6, 8)
    ids, weights = torch.full((6, 1), chosen), torch.ones(6, 1)
    wanted = reference(x, w, weights, ids)
    for blocks in (w.micro_major, w.expert_major):
        torch.testing.assert_close(moe_eager(x, blocks, weights, ids, path="multi_micro").double(), wanted, rtol=1e-5, atol=1e-5)


def test_halves_are_up_then_gate() -> None:
    """Exchanging them must change the result (spec section 10 item 9)."""
    hidden = torch.tensor([[2.0, 3.0]])
    assert gated_unit_eager(hidden, 1).item() == pytest.approx(2.0 * 3.0 / (1 + 2.718281828**-3.0), rel=1e-5)
    assert gated_unit_eager(hidden.flip(-1), 1).item() != pytest.approx(gated_unit_eager(hidden, 1).item(), rel=0.01)


def test_gated_unit_of_several_micro_shards() -> None:
    hidden = torch.randn(3, 12)
    wanted = torch.cat([gated_unit_eager(part, 1) for part in hidden.chunk(2, dim=-1)], dim=-1)
    assert torch.equal(gated_unit_eager(hidden, 2), wanted)


def test_permutation_is_stable_and_counts_empty_experts() -> None:
    permutation = permute_eager(torch.tensor([[3, 0], [0, 3], [3, 1]]), 5)
    assert permutation.counts.tolist() == [2, 1, 0, 3, 0]
    assert permutation.slot.tolist() == [1, 2, 5, 0, 3, 4]
    assert permutation.token.tolist() == [0, 1, 2, 0, 1, 2]


def test_every_row_of_the_grouped_product_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Weights(8, 5, 4, 1)
    monkeypatch.setattr(torch, "empty_like", lambda t: torch.full_like(t, float("nan")))
    x = torch.randn(6, 8)
    out = grouped_experts_eager(x, torch.tensor([0, 4, 0, 2, 0]), w.micro_major[0])
    assert bool(torch.isfinite(out).all())
    parts = [torch.randn(6, 8)]
    done = finalize_eager(parts, permute_eager(torch.tensor([[1], [1], [3], [1], [3], [1]]), 5), torch.ones(6, 1), torch.float32)
    assert bool(torch.isfinite(done).all())


def test_partial_sums_are_added_in_fp32() -> None:
    """bf16 partial sums that cancel: rounding after each block would lose the small one."""
    permutation = permute_eager(torch.tensor([[0]]), 1)
    parts = [torch.tensor([[256.0]]).bfloat16(), torch.tensor([[1.0]]).bfloat16(), torch.tensor([[-256.0]]).bfloat16()]
    done = finalize_eager(parts, permutation, torch.ones(1, 1), torch.bfloat16)
    assert done.item() == 1.0 and done.dtype == torch.bfloat16


def test_equal_inputs_give_equal_bits() -> None:
    w = Weights(16, 8, 6, 2)
    x = torch.randn(33, 16)
    weights, ids = routing(33, 8, 3)
    first = moe_eager(x, w.micro_major, weights, ids, path="multi_micro")
    assert torch.equal(first, moe_eager(x.clone(), w.micro_major, weights.clone(), ids.clone(), path="multi_micro"))
