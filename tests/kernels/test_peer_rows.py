"""The all-reduce of many rows between two blocks of one GPU: one stream plays one rank."""

from __future__ import annotations

import time

import pytest
import torch

from phase_parallel.kernels.peer_reduce import Mailboxes, reduce_residual_norm_eager
from phase_parallel.kernels.peer_rows import reduce_rows, row_block_bytes
from phase_parallel.kernels.residual_norm import residual_norm_triton
from phase_parallel.parallel.abort_word import AbortWord

EPS = 1e-5
# Both ranks' programs must find room on the one device at the same time.
PROGRAMS = 32
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="peers' memory needs a CUDA device")]


def make(capacity: int, hidden: int, dtype: torch.dtype) -> list[Mailboxes]:
    memory = [torch.zeros(row_block_bytes(capacity, hidden, dtype.itemsize), dtype=torch.uint8, device="cuda") for _ in range(2)]
    addresses = torch.tensor([block.data_ptr() for block in memory], dtype=torch.int64, device="cuda")
    addresses.keep = memory  # the blocks live as long as their addresses

    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device="cuda")

    return [Mailboxes(addresses, rank, zeros(PROGRAMS), zeros(1), AbortWord(pinned=True).tensor) for rank in range(2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("capacity", "counts", "hidden"), [(16, (1, 2, 5, 16), 100), (512, (511, 64, 1, 300), 4096), (64, (200, 63), 512)])
def test_sum_of_many_calls(capacity: int, counts: tuple[int, ...], hidden: int, dtype: torch.dtype) -> None:
    """The numbers of rows alternate, some fit one call and some do not, and the ranks start at different times."""
    boxes = make(capacity, hidden, dtype)
    weight = torch.randn(hidden, device="cuda").to(dtype)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for call in range(24):
        count = counts[call % len(counts)]
        summands, start = torch.randn(2, count, hidden, device="cuda").to(dtype), torch.randn(count, hidden, device="cuda").to(dtype)
        own, residuals = [summand.clone() for summand in summands], [start.clone() for _ in range(2)]
        normed = [torch.full_like(start, float("nan")) for _ in range(2)]
        torch.cuda.synchronize()
        for rank in (call % 2, 1 - call % 2):
            with torch.cuda.stream(streams[rank]):
                reduce_rows(boxes[rank], own[rank], residuals[rank], weight, EPS, normed[rank], capacity=capacity, timeout_s=20)
        torch.cuda.synchronize()
        want, want_normed = reduce_residual_norm_eager(summands, start, weight, EPS)
        assert torch.equal(residuals[0], want) and torch.equal(residuals[1], want)
        assert torch.equal(normed[0], normed[1]), "both ranks hold the same bits"
        difference = (normed[0].float() - want_normed.float()).norm() / want_normed.float().norm()
        assert difference < (1e-6 if dtype == torch.float32 else 4e-3)
    assert not any(int(box.failed) for box in boxes)


def test_rounding_is_that_of_the_kernel_behind_a_process_group() -> None:
    """So that a picture does not depend on how the sums are made."""
    hidden, count = 4096, 300
    boxes, weight = make(512, hidden, torch.bfloat16), torch.randn(hidden, device="cuda").bfloat16()
    summands, start = torch.randn(2, count, hidden, device="cuda").bfloat16(), torch.randn(count, hidden, device="cuda").bfloat16()
    want, want_normed = start.clone(), torch.empty_like(start)
    residual_norm_triton(summands[0] + summands[1], want, weight, EPS, want_normed)
    residuals, normed = [start.clone() for _ in range(2)], [torch.empty_like(start) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            reduce_rows(boxes[rank], summands[rank], residuals[rank], weight, EPS, normed[rank], capacity=512, timeout_s=20)
    torch.cuda.synchronize()
    assert torch.equal(residuals[0], want) and torch.equal(normed[0], want_normed)


def call_alone(box: Mailboxes, x: torch.Tensor, timeout_s: float) -> None:
    reduce_rows(box, x, x.clone(), x[0], EPS, torch.empty_like(x), capacity=128, timeout_s=timeout_s)


def test_nobody_waits_again_after_the_peer_stayed_away() -> None:
    """A hundred reductions, of which every program has several parts, end in one limit."""
    box, x = make(128, 64, torch.float32)[0], torch.randn(128, 64, device="cuda")
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(100):
        call_alone(box, x, 0.5)
    last.record()
    torch.cuda.synchronize()
    assert int(box.failed) == 1 and 500 <= first.elapsed_time(last) < 5_000


def test_the_host_ends_the_waiting_of_a_graph() -> None:
    """The peer stays away from a graph of a hundred reductions, and the limit is a minute each; the host's word ends all of them and those after it."""
    box, x = make(128, 64, torch.float32)[0], torch.randn(128, 64, device="cuda")
    word = AbortWord(pinned=True)
    box = Mailboxes(box.addresses, box.rank, box.calls, box.failed, word.tensor)
    word.set()
    call_alone(box, x, 60)  # compiles
    torch.cuda.synchronize()
    assert int(box.failed) == 1
    word.tensor.zero_()
    box.failed.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            call_alone(box, x, 60)
    graph.replay()
    graph.replay()
    over = torch.cuda.Event()
    over.record()
    time.sleep(0.3)
    assert not over.query(), "it waits for the peer"
    asked = time.monotonic()
    word.set()
    torch.cuda.synchronize()
    assert time.monotonic() - asked < 1
    assert int(box.failed) == 1
