"""The CUDA kernel of Hopper's grouped products against the eager mixture of experts, in fp64: tails, empty and crowded experts, both layouts."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from phase_parallel.kernels import cuda_source
from phase_parallel.kernels.expert_groups import count_eager, plan_groups_eager, plan_groups_triton
from phase_parallel.kernels.expert_views import MicroViews
from phase_parallel.kernels.grouped_hopper import experts_by_clusters, hopper_fits, why_not_hopper
from phase_parallel.kernels.moe import ExpertBlock

from .test_grouped_experts import LAYOUTS, blocks_of, error, skewed_ids

# (tokens, experts, topk, hidden, width, micros): one row, tiles that end in either half, whole tiles, more work than clusters.
SIZES = [(1, 8, 3, 512, 256, 1), (37, 8, 2, 512, 128, 2), (200, 3, 2, 512, 256, 2), (384, 4, 1, 1024, 256, 1), (1500, 64, 8, 1024, 384, 2)]
KINDS = ("even", "crowded", "every other")


@pytest.fixture
def hopper() -> torch.device:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of sm_90")
    device = torch.device("cuda", 0)
    assert why_not_hopper(device) is None
    return device


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "kind", "sizes"), product(LAYOUTS, KINDS, SIZES))
def test_each_pair_gets_its_experts_product(hopper: torch.device, layout: str, kind: str, sizes: tuple[int, ...]) -> None:
    tokens, experts, topk, hidden, width, micros = sizes
    blocks = blocks_of(layout, experts, micros, width, hidden, torch.bfloat16, hopper)
    x = torch.randn(tokens, hidden, device=hopper).bfloat16()
    ids = skewed_ids(kind, tokens, min(topk, experts // 2) if kind == "every other" else topk, experts, hopper)
    groups, views = plan_groups_triton(ids, experts, count_eager(ids, experts)), MicroViews.of(blocks)
    assert hopper_fits(x, views, experts)
    got = experts_by_clusters(x, views, groups, experts, ids.shape[1])
    assert error(got, pairs_in_order(x, blocks, ids, experts)) < 5e-3
    assert torch.equal(got, experts_by_clusters(x, views, groups, experts, ids.shape[1])), "one order of every sum"


def pairs_in_order(x: torch.Tensor, blocks: tuple[ExpertBlock, ...], ids: torch.Tensor, experts: int) -> torch.Tensor:
    """fp64, with the activation rounded as it is stored."""
    groups = plan_groups_eager(ids.long(), experts)
    want = torch.zeros(ids.numel(), x.shape[1], dtype=torch.float64, device=x.device)
    ends = groups.ends.tolist()
    for expert, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        want[first:last] = _expert(x[groups.row_of[first:last].long() // ids.shape[1]], blocks, expert)
    return want


def _expert(rows: torch.Tensor, blocks: tuple[ExpertBlock, ...], expert: int) -> torch.Tensor:
    total = torch.zeros(rows.shape[0], rows.shape[1], dtype=torch.float64, device=rows.device)
    for block in blocks:
        for w1, w2 in zip(block.w1[expert].chunk(block.micros), block.w2[expert].chunk(block.micros, dim=1), strict=True):
            up, gate = (rows.double() @ w1.double().T).chunk(2, dim=-1)
            total += (up * torch.nn.functional.silu(gate)).bfloat16().double() @ w2.double().T
    return total


@pytest.mark.gpu
def test_sizes_that_are_not_whole_tiles_run_elsewhere(hopper: torch.device) -> None:
    for hidden, width, micros in ((256, 256, 1), (512, 128, 1), (512, 192, 2)):
        views = MicroViews.of(blocks_of("micro_major", 2, micros, width, hidden, torch.bfloat16, hopper))
        assert not hopper_fits(torch.zeros(1, hidden, dtype=torch.bfloat16, device=hopper), views, 2)


def test_why_not_without_the_device_or_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_hopper(torch.device("cpu")) == "no CUDA device"
    monkeypatch.setattr(cuda_source, "driver", None)
    assert cuda_source.why_not_compiled() == "cuda.bindings is not installed"


def test_bindings_without_their_compiler_are_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are installed for themselves, and look for NVRTC of their own version when it is first called."""

    class Bindings:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("Failed to dlopen libnvrtc.so.13")

    monkeypatch.setattr(cuda_source, "driver", object())
    monkeypatch.setattr(cuda_source, "nvrtc", Bindings())
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    device = torch.device("cuda", 5)
    assert why_not_hopper(device) == "hopper_experts.cu cannot be compiled: Failed to dlopen libnvrtc.so.13"
