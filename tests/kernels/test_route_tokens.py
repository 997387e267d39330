"""The router of many tokens against the eager one, and the sort that its counts begin."""

from __future__ import annotations

import pytest
import torch

from phase_parallel.kernels.expert_groups import count_eager, plan_groups_eager, plan_groups_triton
from phase_parallel.kernels.route_tokens import RouteTile, choose_route_tile, route_tokens_triton
from phase_parallel.kernels.router import route_tokens_eager

pytestmark = pytest.mark.usefixtures("bf16_products")

# (tokens, experts, topk, hidden): of one block and of several, experts that fill no power of 2, depths that fill no step.
SIZES = [(1, 8, 3, 64), (17, 64, 8, 128), (35, 6, 2, 100), (16, 33, 5, 40), (5, 1, 1, 24)]
if torch.cuda.is_available():
    SIZES += [(1251, 64, 8, 4096), (4106, 64, 8, 4096), (6290, 64, 8, 4096), (8212, 64, 8, 4096)]


def draw(tokens: int, experts: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + experts)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    weight = torch.randn(experts, hidden, generator=generator) * hidden**-0.5
    return x.to(device), weight.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("tokens", "experts", "topk", "hidden"), SIZES)
def test_against_the_eager_router(triton_device: torch.device, tokens: int, experts: int, topk: int, hidden: int, dtype: torch.dtype) -> None:
    x, weight = draw(tokens, experts, hidden, dtype, triton_device)
    got, want = route_tokens_triton(x, weight, topk, True), route_tokens_eager(x, weight, topk, True)
    # Matrix units cut the digits that an fp32 sum cannot hold, where other units round them: more terms, more of that.
    size = x.double().abs() @ weight.double().abs().T
    error = ((got.logits.double() - x.double() @ weight.double().T).abs() / size).max()
    assert error < 1e-6, f"{error:.1e}"
    # By value: near a tie the rounding decides who comes first.
    relative = 2e-5 if hidden < 1000 else 1e-4
    torch.testing.assert_close(got.weights, want.weights, rtol=relative, atol=1e-7)
    chosen = want.logits.softmax(-1).gather(1, got.ids.long())
    torch.testing.assert_close(got.weights, chosen / chosen.sum(-1, keepdim=True), rtol=relative, atol=1e-7)
    assert got.weights.dtype == torch.float32 and got.ids.dtype == torch.int32
    counts = count_eager(got.ids, experts, got.counts.block)
    assert torch.equal(got.counts.table, counts.table)


def test_bf16_tokens_have_logits_of_fp32_quality(triton_device: torch.device) -> None:
    """An error of one rounded bf16 weight would be a thousand times larger."""
    x, weight = draw(16, 16, 512, torch.bfloat16, triton_device)
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    error = ((route_tokens_triton(x, weight, 2, True).logits.double() - exact).abs() / size).max()
    assert error < 1e-6, f"{error:.1e}"


def test_large_weights_do_not_hide_small_parts(triton_device: torch.device) -> None:
    """The sum of the high parts is zero here, so what remains is what the lower parts hold."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).to(triton_device)
    x = torch.ones(16, 128, device=triton_device).bfloat16()
    both = torch.cat((weight, -weight.bfloat16().float()), dim=1).contiguous()
    got = route_tokens_triton(x, both, 2, True).logits.double()
    torch.testing.assert_close(got, x.double() @ both.double().T, rtol=0, atol=2e-6)


def test_equal_probabilities_go_by_the_number(triton_device: torch.device) -> None:
    weight = torch.ones(9, 32, device=triton_device)
    weight[6] = 2.0
    routing = route_tokens_triton(torch.ones(3, 32, device=triton_device), weight, 4)
    assert routing.ids.tolist() == [[6, 0, 1, 2]] * 3
    assert routing.logits is None


def test_nobody_chooses_for_rows_behind_the_last(triton_device: torch.device) -> None:
    x, weight = draw(5, 8, 32, torch.float32, triton_device)
    table = route_tokens_triton(x, weight, 2).counts.table
    assert int(table.sum()) == 5 * 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_chooses_different_experts(triton_device: torch.device, value: float) -> None:
    x, weight = draw(3, 8, 32, torch.float32, triton_device)
    x[1, 5] = value
    routing = route_tokens_triton(x, weight, 4)
    assert sorted(routing.ids[1].tolist()) == [0, 1, 2, 3]
    assert torch.equal(routing.counts.table, count_eager(routing.ids, 8, routing.counts.block).table)


def test_rows_may_be_strided(triton_device: torch.device) -> None:
    x, weight = draw(20, 8, 48, torch.float32, triton_device)
    wide = torch.cat((x, torch.full_like(x, float("nan"))), dim=1)
    assert torch.equal(route_tokens_triton(wide[:, :48], weight, 3).weights, route_tokens_triton(x, weight, 3).weights)


@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_every_tile_agrees_and_repeats_its_bits(triton_device: torch.device, tokens: int) -> None:
    x, weight = draw(70, 16, 128, torch.bfloat16, triton_device)
    first, again = (route_tokens_triton(x, weight, 4, True, tile=RouteTile(tokens, 64, 4, 2)) for _ in range(2))
    torch.testing.assert_close(first.logits.double(), x.double() @ weight.double().T, rtol=0, atol=4e-6)
    assert torch.equal(first.logits, again.logits) and torch.equal(first.ids, again.ids)
    assert torch.equal(first.counts.table, count_eager(first.ids, 16, tokens).table)


def test_tiles_follow_the_number_of_tokens() -> None:
    assert [choose_route_tile(tokens, 2).tokens for tokens in (100, 1251, 4106, 8212)] == [16, 32, 64, 64]


@pytest.mark.parametrize("kind", ["even", "crowded", "every other"])
@pytest.mark.parametrize(("tokens", "experts", "topk", "block"), [(1, 8, 3, 16), (70, 64, 8, 32), (300, 6, 2, 64), (130, 5, 5, 16)])
def test_sorting_is_stable(triton_device: torch.device, kind: str, tokens: int, experts: int, topk: int, block: int) -> None:
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    if kind == "crowded":  # nearly all tokens choose the same experts, most experts get none
        scores = scores * 0.01 + torch.arange(experts).flip(0)
    elif kind == "every other":
        scores = scores + 2.0 * (torch.arange(experts) % 2)
    ids = scores.topk(topk, dim=-1).indices.int().to(triton_device)
    got, want = plan_groups_triton(ids, experts, count_eager(ids, experts, block)), plan_groups_eager(ids, experts)
    assert torch.equal(got.row_of, want.row_of)
    assert torch.equal(got.place_of, want.place_of)
    assert torch.equal(got.ends, want.ends)


def test_more_blocks_than_are_read_at_a_time(triton_device: torch.device) -> None:
    ids = torch.stack((torch.arange(1100) % 3, torch.full((1100,), 3)), dim=1).int().to(triton_device)
    got, want = plan_groups_triton(ids, 4, count_eager(ids, 4, 16)), plan_groups_eager(ids, 4)
    assert torch.equal(got.row_of, want.row_of) and torch.equal(got.ends, want.ends)
