"""The fused all-reduce where Triton is interpreted: what one rank writes, adds and tells. Its peers' part is played by the test."""

from __future__ import annotations

import threading
import time

import pytest
import torch

pytest.importorskip("triton")

from spinning import spin_in_python

from phase_parallel.kernels import peer_reduce
from phase_parallel.kernels.peer_gather import gather_bytes, gathered, gemv_gather, gemv_gather_eager
from phase_parallel.kernels.peer_reduce import HEADER_WORDS, Mailboxes, mailbox_bytes, reduce_residual_norm, reduce_residual_norm_eager
from phase_parallel.parallel.abort_word import AbortWord

EPS = 1e-5
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the real kernel is tested")


@pytest.fixture(autouse=True)
def _spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_reduce, "_spin_until", spin_in_python)


class World:
    """Mailboxes of ``ranks`` ranks in this process."""

    def __init__(self, ranks: int, hidden: int, dtype: torch.dtype):
        self.ranks, self.hidden, self.dtype = ranks, hidden, dtype
        self.memory = [torch.zeros(mailbox_bytes(ranks, hidden, dtype.itemsize), dtype=torch.uint8) for _ in range(ranks)]
        self.addresses = torch.tensor([box.data_ptr() for box in self.memory])
        self.word = AbortWord(pinned=False)

    def boxes(self, rank: int) -> Mailboxes:
        calls, failed = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
        return Mailboxes(self.addresses, rank, calls, failed, self.word.tensor)

    def counters(self, rank: int) -> torch.Tensor:
        return self.memory[rank][: HEADER_WORDS * 4].view(torch.int32)

    def rows(self, rank: int, call: int) -> torch.Tensor:
        """``[ranks, H]`` of the call's parity."""
        return self.memory[rank][HEADER_WORDS * 4 :].view(self.dtype).view(2, self.ranks, self.hidden)[call % 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])  # the interpreter cuts bfloat16 instead of rounding it
@pytest.mark.parametrize(("ranks", "hidden"), [(1, 64), (2, 100), (3, 48)])
def test_sums_equal_the_eager_ones(ranks: int, hidden: int, dtype: torch.dtype) -> None:
    world, me = World(ranks, hidden, dtype), ranks - 1
    boxes = world.boxes(me)
    generator = torch.Generator().manual_seed(2)
    weight, residual = (torch.randn(hidden, generator=generator).to(dtype) for _ in range(2))
    want = residual.clone()
    for call in range(1, 5):
        summands = torch.randn(ranks, hidden, generator=generator).to(dtype)
        for peer in set(range(ranks)) - {me}:
            world.rows(me, call)[peer] = summands[peer]
            world.counters(me)[peer] = call
        normed = torch.full_like(residual, float("nan"))
        reduce_residual_norm(boxes, summands[me], residual, weight, EPS, normed, timeout_s=20)
        want, want_normed = reduce_residual_norm_eager(summands, want, weight, EPS)
        torch.testing.assert_close(residual, want, rtol=0, atol=0)
        torch.testing.assert_close(normed, want_normed, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
        for rank in range(ranks):
            assert torch.equal(world.rows(rank, call)[me], summands[me]) and int(world.counters(rank)[me]) == call
    assert int(boxes.failed) == 0 and int(boxes.calls) == 4


def reduce_once(boxes: Mailboxes, timeout_s: float) -> float:
    """Seconds of one reduction."""
    x = torch.ones(8)
    began = time.monotonic()
    reduce_residual_norm(boxes, x, x.clone(), x, EPS, torch.empty_like(x), timeout_s=timeout_s)
    return time.monotonic() - began


def test_the_hosts_word_ends_a_wait_and_those_after_it() -> None:
    world = World(2, 8, torch.float32)
    boxes = world.boxes(0)
    timer = threading.Timer(0.3, world.word.set)
    timer.start()
    assert 0.2 < reduce_once(boxes, timeout_s=30) < 5
    assert int(boxes.failed) == 1
    assert reduce_once(boxes, timeout_s=30) < 5


def test_nobody_waits_again_after_a_peer_stayed_away() -> None:
    world = World(2, 8, torch.float32)
    boxes = world.boxes(1)
    assert reduce_once(boxes, timeout_s=0.5) > 0.5
    assert int(boxes.failed) == 1 and int(boxes.abort) == 0
    assert reduce_once(boxes, timeout_s=30) < 5


@pytest.mark.parametrize(("ranks", "rows", "columns"), [(1, 5, 64), (2, 33, 100), (3, 8, 40)])
def test_every_rank_gets_this_ranks_rows(ranks: int, rows: int, columns: int) -> None:
    """The other ranks' rows and counters are played by the test."""
    me, generator = ranks - 1, torch.Generator().manual_seed(3)
    blocks = [torch.zeros(gather_bytes(ranks * rows), dtype=torch.uint8) for _ in range(ranks)]
    addresses = torch.tensor([block.data_ptr() for block in blocks])
    calls, failed = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    boxes = Mailboxes(addresses, me, calls, failed, AbortWord(pinned=False).tensor)
    parts = [torch.randn(rows, columns, generator=generator) for _ in range(ranks)]
    for call in range(1, 4):
        x = torch.randn(columns, generator=generator)
        want = gemv_gather_eager(x, parts)
        for peer in set(range(ranks)) - {me}:
            gathered(blocks[me])[peer * rows : (peer + 1) * rows] = want[peer * rows : (peer + 1) * rows]
            blocks[me][: HEADER_WORDS * 4].view(torch.int32)[peer] = call
        gemv_gather(boxes, x, parts[me], me * rows, timeout_s=20)
        torch.testing.assert_close(gathered(blocks[me]), want)
        for block in blocks:
            torch.testing.assert_close(gathered(block)[me * rows :], want[me * rows :])
            assert int(block[: HEADER_WORDS * 4].view(torch.int32)[me]) == call
    assert int(failed) == 0 and int(calls) == 3


def test_a_gather_that_a_peer_stays_away_from_is_told() -> None:
    blocks = [torch.zeros(gather_bytes(8), dtype=torch.uint8) for _ in range(2)]
    calls, failed = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    boxes = Mailboxes(torch.tensor([block.data_ptr() for block in blocks]), 0, calls, failed, AbortWord(pinned=False).tensor)
    gemv_gather(boxes, torch.ones(16), torch.ones(4, 16), 0, timeout_s=0.2)
    assert int(failed) == 1
