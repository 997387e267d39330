"""The fused all-reduce between several mailboxes of one GPU: one stream plays one rank."""

from __future__ import annotations

import time

import pytest
import torch

from phase_parallel.kernels.peer_reduce import Mailboxes, mailbox_bytes, reduce_residual_norm, reduce_residual_norm_eager
from phase_parallel.parallel.abort_word import AbortWord

EPS = 1e-5
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="peers' memory needs a CUDA device")


def make(ranks: int, hidden: int, dtype: torch.dtype) -> list[Mailboxes]:
    size = mailbox_bytes(ranks, hidden, dtype.itemsize)
    memory = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(ranks)]
    addresses = torch.tensor([box.data_ptr() for box in memory], dtype=torch.int64, device="cuda")
    addresses.keep = memory  # the mailboxes live as long as their addresses

    def zero() -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32, device="cuda")

    return [Mailboxes(addresses, rank, zero(), zero(), AbortWord(pinned=True).tensor) for rank in range(ranks)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("ranks", "hidden"), [(1, 64), (2, 100), (3, 4096), (4, 4096), (8, 512)])
def test_sum_of_many_calls(ranks: int, hidden: int, dtype: torch.dtype) -> None:
    boxes = make(ranks, hidden, dtype)
    weight = torch.randn(hidden, device="cuda").to(dtype)
    start = torch.randn(hidden, device="cuda").to(dtype)
    residuals = [start.clone() for _ in range(ranks)]
    normed = [torch.full_like(start, float("nan")) for _ in range(ranks)]
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    want = start.clone()
    for _ in range(50):
        summands = torch.randn(ranks, hidden, device="cuda").to(dtype)
        own = [summand.clone() for summand in summands]  # aligned alike, so that one binary serves all ranks
        torch.cuda.synchronize()
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                reduce_residual_norm(boxes[rank], own[rank], residuals[rank], weight, EPS, normed[rank], timeout_s=20)
        torch.cuda.synchronize()
        want, want_normed = reduce_residual_norm_eager(summands, want, weight, EPS)
        for rank in range(ranks):
            assert torch.equal(residuals[rank], want), f"rank {rank}"
            assert torch.equal(normed[rank], normed[0]), "all ranks hold the same bits"
            difference = (normed[rank].float() - want_normed.float()).norm() / want_normed.float().norm()
            assert difference < (1e-6 if dtype == torch.float32 else 4e-3)
    assert all(int(box.failed) == 0 for box in boxes)


def test_a_peer_that_does_not_come_is_told() -> None:
    box = make(2, 64, torch.float32)[0]
    x = torch.randn(64, device="cuda")
    reduce_residual_norm(box, x, x.clone(), x, EPS, torch.empty_like(x), timeout_s=0.2)
    torch.cuda.synchronize()
    assert int(box.failed) == 1


def test_nobody_waits_again_after_a_peer_stayed_away() -> None:
    """A hundred reductions with a limit of half a second each end in far less than fifty seconds."""
    box = make(2, 64, torch.float32)[0]
    x = torch.randn(64, device="cuda")
    out = torch.empty_like(x)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    reduce_residual_norm(box, x, x.clone(), x, EPS, out, timeout_s=0.5)
    first.record()
    for _ in range(100):
        reduce_residual_norm(box, x, x.clone(), x, EPS, out, timeout_s=0.5)
    last.record()
    torch.cuda.synchronize()
    assert first.elapsed_time(last) < 5_000


def test_the_host_ends_the_waiting_of_a_graph() -> None:
    """A peer stays away from a graph of a hundred reductions, and the limit is a minute each; the host's word ends all of them and those after it."""
    box = make(2, 64, torch.float32)[0]
    word = AbortWord(pinned=True)
    box = Mailboxes(box.addresses, box.rank, box.calls, box.failed, word.tensor)
    x = torch.randn(64, device="cuda")
    out, residual = torch.empty_like(x), x.clone()
    word.set()
    reduce_residual_norm(box, x, residual, x, EPS, out, timeout_s=60)  # compiles
    torch.cuda.synchronize()
    assert int(box.failed) == 1
    word.tensor.zero_()
    box.failed.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            reduce_residual_norm(box, x, residual, x, EPS, out, timeout_s=60)
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


def test_a_word_that_is_set_fails_nobody_whose_peers_came() -> None:
    """Only who waits looks at it."""
    word = AbortWord(pinned=True)
    word.set()
    boxes = [Mailboxes(box.addresses, box.rank, box.calls, box.failed, word.tensor) for box in make(1, 64, torch.float32)]
    x = torch.randn(64, device="cuda")
    for _ in range(10):
        reduce_residual_norm(boxes[0], x, x.clone(), x, EPS, torch.empty_like(x), timeout_s=5)
    torch.cuda.synchronize()
    assert int(boxes[0].failed) == 0
