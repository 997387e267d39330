"""Experts through PyTorch's grouped product against a loop over the experts, in both layouts and on both paths."""

from __future__ import annotations

import pytest
import torch

from phase_parallel.bench import grouped_mm_experts as module
from phase_parallel.bench.grouped_mm_experts import _sum_eager, _sum_triton, grouped_mm_experts, why_not_grouped_mm, with_grouped_mm
from phase_parallel.kernels.expert_groups import count_eager, plan_groups_eager
from phase_parallel.kernels.kernel_set import EAGER
from phase_parallel.kernels.moe import ExpertBlock, moe_eager
from phase_parallel.kernels.router import Routing

TOKENS, HIDDEN, EXPERTS, TOPK, WIDTH, MICROS = 37, 32, 7, 3, 16, 2
pytestmark = pytest.mark.skipif(why_not_grouped_mm() is not None, reason=str(why_not_grouped_mm()))


def blocks_of(layout: str, device: torch.device, dtype: torch.dtype) -> tuple[ExpertBlock, ...]:
    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * shape[-1] ** -0.5).to(device, dtype)

    if layout == "expert_major":
        return (ExpertBlock(draw(EXPERTS, MICROS * 2 * WIDTH, HIDDEN), draw(EXPERTS, HIDDEN, MICROS * WIDTH), MICROS),)
    w1, w2 = draw(MICROS, EXPERTS, 2 * WIDTH, HIDDEN), draw(MICROS, EXPERTS, HIDDEN, WIDTH)
    return tuple(ExpertBlock(w1[m], w2[m], 1) for m in range(MICROS))


def inputs(device: torch.device, dtype: torch.dtype, *, crowded: bool) -> tuple[torch.Tensor, torch.Tensor, Routing]:
    generator = torch.Generator().manual_seed(1)
    x, shared = (torch.randn(TOKENS, HIDDEN, generator=generator).to(device, dtype) for _ in range(2))
    # Crowded: three experts take all tokens, the others none.
    ids = torch.stack([torch.randperm(TOPK if crowded else EXPERTS, generator=generator)[:TOPK] for _ in range(TOKENS)]).int().to(device)
    weights = torch.rand(TOKENS, TOPK, generator=generator).to(device)
    return x, shared, Routing(weights, ids, count_eager(ids, EXPERTS))


WAYS = [("micro_major", "multi_micro"), ("micro_major", "two_dispatch"), ("expert_major", "multi_micro")]


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize(("layout", "path"), WAYS)
def test_same_numbers_as_the_loop(layout: str, path: str, crowded: bool) -> None:
    blocks = blocks_of(layout, torch.device("cpu"), torch.float32)
    x, shared, routing = inputs(torch.device("cpu"), torch.float32, crowded=crowded)
    wanted = shared + moe_eager(x, blocks, routing.weights, routing.ids.long(), path=path)
    got = grouped_mm_experts(x, blocks, routing, shared, path)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(got, grouped_mm_experts(x, blocks, routing, shared, path))


@pytest.mark.parametrize(("path", "products"), [("multi_micro", 4), ("two_dispatch", 4)])
def test_two_dispatches_sort_and_add_twice(path: str, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"products": 0, "sorts": 0, "sums": 0}

    def counting(name: str, real: object) -> object:
        def count(*args: object, **more: object) -> object:
            made[name] += 1
            return real(*args, **more)

        return count

    product = module._product()
    monkeypatch.setattr(module, "_product", lambda: counting("products", product))
    monkeypatch.setattr(module, "plan_groups_eager", counting("sorts", plan_groups_eager))
    monkeypatch.setattr(module, "_sum_eager", counting("sums", _sum_eager))
    x, shared, routing = inputs(torch.device("cpu"), torch.float32, crowded=False)
    grouped_mm_experts(x, blocks_of("micro_major", torch.device("cpu"), torch.float32), routing, shared, path)
    assert made == {"products": products, "sorts": 2 if path == "two_dispatch" else 1, "sums": 2 if path == "two_dispatch" else 1}


def test_the_sum_of_the_device_is_the_eager_one(triton_device: torch.device) -> None:
    _, shared, routing = inputs(triton_device, torch.float32, crowded=False)
    groups = plan_groups_eager(routing.ids, EXPERTS)
    parts = torch.randn(TOKENS * TOPK, HIDDEN, device=triton_device)
    wanted = _sum_eager(parts, groups.place_of, routing.weights, shared)
    torch.testing.assert_close(_sum_triton(parts, groups.place_of, routing.weights, shared), wanted, rtol=1e-6, atol=1e-6)


def test_only_the_experts_change() -> None:
    changed = with_grouped_mm(EAGER)
    assert changed.experts is grouped_mm_experts and changed.moe_words == "grouped_mm"
    assert (changed.name, changed.attend, changed.route) == (EAGER.name, EAGER.attend, EAGER.route)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("layout", "path"), WAYS)
def test_on_a_gpu_in_bf16_without_waiting(layout: str, path: str) -> None:
    device = torch.device("cuda")
    blocks = blocks_of(layout, device, torch.bfloat16)
    x, shared, routing = inputs(device, torch.bfloat16, crowded=False)
    doubled = tuple(ExpertBlock(b.w1.double(), b.w2.double(), b.micros) for b in blocks)
    wanted = shared.double() + moe_eager(x.double(), doubled, routing.weights.double(), routing.ids.long(), path=path)
    grouped_mm_experts(x, blocks, routing, shared, path)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = grouped_mm_experts(x, blocks, routing, shared, path)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float((got.double() - wanted).norm() / wanted.norm()) < 2e-2
