"""Grouped experts against the eager mixture of experts: odd sizes, empty and crowded experts, both layouts."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from phase_parallel.kernels.expert_groups import count_eager, plan_groups_triton
from phase_parallel.kernels.expert_views import MicroViews, WeightRows, matrices
from phase_parallel.kernels.grouped_descriptors import descriptors_fit, experts_by_descriptors
from phase_parallel.kernels.grouped_experts import grouped_experts
from phase_parallel.kernels.grouped_pointers import choose_tiles, experts_by_pointers
from phase_parallel.kernels.grouped_tiles import Tile
from phase_parallel.kernels.moe import ExpertBlock, moe_eager
from phase_parallel.kernels.router import Routing


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert torch.isfinite(got).all(), "something was not written"
    return float((got.double() - want.double()).norm() / want.double().norm())


def blocks_of(layout: str, experts: int, micros: int, width: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[ExpertBlock, ...]:
    if layout == "micro_major":
        w1 = torch.randn(micros, experts, 2 * width, hidden, device=device) * hidden**-0.5
        w2 = torch.randn(micros, experts, hidden, width, device=device) * width**-0.5
        return tuple(ExpertBlock(w1[m].to(dtype), w2[m].to(dtype), 1) for m in range(micros)) if micros == 1 else _views(w1.to(dtype), w2.to(dtype))
    w1 = torch.randn(experts, micros * 2 * width, hidden, device=device) * hidden**-0.5
    w2 = torch.randn(experts, hidden, micros * width, device=device) * width**-0.5
    return (ExpertBlock(w1.to(dtype), w2.to(dtype), micros),)


def _views(w1: torch.Tensor, w2: torch.Tensor) -> tuple[ExpertBlock, ...]:
    return tuple(ExpertBlock(w1[m], w2[m], 1) for m in range(w1.shape[0]))


def doubled(blocks: tuple[ExpertBlock, ...]) -> tuple[ExpertBlock, ...]:
    return tuple(ExpertBlock(b.w1.double(), b.w2.double(), b.micros) for b in blocks)


def skewed_ids(kind: str, tokens: int, topk: int, experts: int, device: torch.device) -> torch.Tensor:
    if kind == "even":
        scores = torch.rand(tokens, experts, device=device)
    elif kind == "crowded":  # nearly all tokens choose the same experts, most experts get none
        scores = torch.rand(tokens, experts, device=device) * 0.01 + torch.arange(experts, device=device).flip(0)
    else:  # one expert in two is never chosen
        scores = torch.rand(tokens, experts, device=device) + 2.0 * (torch.arange(experts, device=device) % 2)
    return scores.topk(topk, dim=-1).indices.int()


# (tokens, experts, topk, hidden, width, micros). Few and small in the interpreter: tiles of 16 rows, then of 64 and 128.
CASES = [
    ("micro_major", "even", (1, 8, 3, 64, 12, 1)),
    ("micro_major", "crowded", (5, 33, 4, 32, 16, 1)),
    ("expert_major", "every other", (5, 33, 4, 32, 16, 1)),
    ("micro_major", "every other", (11, 5, 2, 50, 33, 2)),
    ("expert_major", "crowded", (11, 5, 2, 50, 33, 2)),
    ("micro_major", "even", (25, 2, 2, 36, 8, 3)),
    ("expert_major", "even", (25, 2, 2, 36, 8, 3)),
    ("micro_major", "even", (97, 1, 1, 40, 12, 2)),
]
LAYOUTS, KINDS = ("micro_major", "expert_major"), ("even", "crowded", "every other")
LARGER = [(40, 8, 2, 96, 24, 2), (70, 6, 2, 50, 33, 2), (33, 64, 8, 32, 16, 1), (200, 4, 4, 64, 32, 4)]
if torch.cuda.is_available():
    CASES += product(LAYOUTS, KINDS, LARGER)


@pytest.mark.parametrize(("layout", "kind", "sizes"), CASES)
def test_whole_mixture(triton_device: torch.device, layout: str, kind: str, sizes: tuple[int, ...]) -> None:
    tokens, experts, topk, hidden, width, micros = sizes
    dtypes = [torch.float32, torch.bfloat16] if triton_device.type == "cuda" else [torch.float32]
    for dtype in dtypes:
        blocks = blocks_of(layout, experts, micros, width, hidden, dtype, triton_device)
        x = torch.randn(tokens, hidden, device=triton_device).to(dtype)
        shared = torch.randn(tokens, hidden, device=triton_device).to(dtype)
        ids = skewed_ids(kind, tokens, min(topk, experts // 2) if kind == "every other" else topk, experts, triton_device)
        weights = torch.rand(ids.shape, device=triton_device)
        want = moe_eager(x.double(), doubled(blocks), weights.double(), ids.long(), path="multi_micro")
        limit = 1e-5 if dtype == torch.float32 else 1e-2
        assert error(grouped_experts(x, blocks, Routing(weights, ids, count_eager(ids, experts)), shared), want + shared.double()) < limit


def test_without_a_shared_expert_and_again(triton_device: torch.device) -> None:
    blocks = blocks_of("micro_major", 3, 2, 20, 40, torch.float32, triton_device)
    x = torch.randn(7, 40, device=triton_device)
    ids = skewed_ids("even", 7, 2, 3, triton_device)
    weights = torch.rand(ids.shape, device=triton_device)
    routing = Routing(weights, ids, count_eager(ids, 3))
    got = grouped_experts(x, blocks, routing)
    assert error(got, moe_eager(x.double(), doubled(blocks), weights.double(), ids.long(), path="multi_micro")) < 1e-5
    assert torch.equal(got, grouped_experts(x, blocks, routing)), "one order of every sum"


def test_micro_shards_must_be_views_of_one_tensor() -> None:
    apart = tuple(ExpertBlock(torch.zeros(2, 4, 8), torch.zeros(2, 8, 2), 1) for _ in range(3))
    with pytest.raises(ValueError, match="equally spaced"):
        MicroViews.of((apart[0], apart[2], apart[1], apart[0]))


def test_columns_must_be_contiguous() -> None:
    turned = ExpertBlock(torch.zeros(2, 8, 4).transpose(1, 2), torch.zeros(2, 8, 2), 1)
    with pytest.raises(ValueError, match="contiguous columns"):
        MicroViews.of((turned,))


def test_tiles_follow_the_rows_of_an_expert() -> None:
    sizes = [choose_tiles(pairs, 64, 768, 4096, 2)[0].rows for pairs in (64, 4000, 10008, 50320)]
    assert sizes == [16, 64, 64, 128]
    assert choose_tiles(50320, 64, 768, 4096, 4)[0].rows == 16, "fp32 is for checks, and its tiles must fit every device"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layout", "sizes"), [("micro_major", (9, 5, 2, 32, 32, 2)), ("expert_major", (9, 5, 2, 32, 32, 2)), ("micro_major", (40, 4, 1, 16, 16, 1))]
)
@pytest.mark.parametrize("in_order", [False, True])
def test_descriptors_fetch_what_pointers_do(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch, in_order: bool, layout: str, sizes: tuple[int, ...], kind: str
) -> None:
    tokens, experts, topk, hidden, width, micros = sizes
    dtype = torch.bfloat16 if triton_device.type == "cuda" else torch.float32
    if triton_device.type == "cuda":
        hidden, width = hidden * 16, width * 16
    blocks = blocks_of(layout, experts, micros, width, hidden, dtype, triton_device)
    x = torch.randn(tokens, hidden, device=triton_device).to(dtype)
    ids = skewed_ids(kind, tokens, min(topk, experts // 2) if kind == "every other" else topk, experts, triton_device)
    groups, views = plan_groups_triton(ids, experts, count_eager(ids, experts)), MicroViews.of(blocks)
    tile = Tile(16, 16, 16, 4, 2) if triton_device.type == "cpu" else Tile(64, 128, 64, 4, 3)
    monkeypatch.setattr("phase_parallel.kernels.grouped_descriptors.SORTED_FROM", 1 if in_order else 10**9)
    assert descriptors_fit(views, up=tile, down=tile)
    got = experts_by_descriptors(x, views, groups, experts, ids.shape[1], up=tile, down=tile)
    assert error(got, experts_by_pointers(x, views, groups, experts, ids.shape[1])) < (1e-6 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("whole", [True, False])
def test_weights_as_rows_of_one_matrix(layout: str, whole: bool) -> None:
    """Every expert of every micro shard is where the row arithmetic says; ``whole`` False takes one micro shard's view, as decode does."""
    experts, micros, width, hidden = 3, 2, 8, 16
    blocks = blocks_of(layout, experts, micros, width, hidden, torch.float32, torch.device("cpu"))
    if layout == "expert_major" and not whole:
        blocks = (ExpertBlock(blocks[0].w1[:, 2 * width :], blocks[0].w2[:, :, width:], 1),)
    elif not whole:
        blocks = blocks[1:]
    shards = 1 if not whole else micros
    views = MicroViews.of(blocks)
    up, down = matrices(views)
    for rows, name, height, across in ((up, "w1", 2 * width, hidden), (down, "w2", hidden, width)):
        seen = torch.as_strided(rows.base, (rows.rows, rows.columns), (rows.row_stride, 1), rows.base.storage_offset())
        for expert, micro in product(range(experts), range(shards)):
            if len(blocks) > 1:
                want = getattr(blocks[micro], name)[expert]
            else:
                part = getattr(blocks[0], name)[expert]
                want = part[micro * height : (micro + 1) * height] if name == "w1" else part[:, micro * width : (micro + 1) * width]
            first, left = expert * rows.expert_rows + micro * rows.micro_rows, micro * rows.micro_columns
            assert torch.equal(seen[first : first + height, left : left + across], want)


def test_weights_that_are_not_rows_of_one_matrix() -> None:
    base = torch.zeros(100)
    assert WeightRows.of(base.as_strided((2, 3, 4), (13, 4, 1)), 3, 4, 1, 0) is None
    unaligned = WeightRows.of(torch.zeros(2, 3, 5), 3, 5, 1, 0)
    assert unaligned is not None and not unaligned.aligned
