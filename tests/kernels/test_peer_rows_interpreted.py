"""The all-reduce of many rows where Triton is interpreted: what one rank sends, adds and tells. Its peer's part is played by the test."""

from __future__ import annotations

import threading
import time

import pytest
import torch

pytest.importorskip("triton")

from spinning import spin_in_python

from phase_parallel.kernels import peer_rows
from phase_parallel.kernels.peer_reduce import Mailboxes, reduce_residual_norm_eager
from phase_parallel.kernels.peer_rows import ROWS, flag_bytes, reduce_rows, row_block_bytes
from phase_parallel.parallel.abort_word import AbortWord

EPS = 1e-5
PROGRAMS = 3
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the real kernel is tested")


@pytest.fixture(autouse=True)
def _spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_rows, "_spin_until", spin_in_python)


class Pair:
    """The blocks of two ranks; this one is ``me``."""

    def __init__(self, me: int, capacity: int, hidden: int, dtype: torch.dtype = torch.float32, programs: int = PROGRAMS):
        self.me, self.capacity, self.hidden, self.dtype = me, capacity, hidden, dtype
        self.memory = [torch.zeros(row_block_bytes(capacity, hidden, dtype.itemsize), dtype=torch.uint8) for _ in range(2)]
        self.word = AbortWord(pinned=False)
        calls, failed = torch.zeros(programs, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        self.boxes = Mailboxes(torch.tensor([block.data_ptr() for block in self.memory]), me, calls, failed, self.word.tensor)

    def flags(self, rank: int) -> torch.Tensor:
        return self.memory[rank][: flag_bytes(self.capacity)].view(torch.int32)

    def rows(self, rank: int, call: int) -> torch.Tensor:
        """``[capacity, H]`` of the call's parity in the block of ``rank``."""
        return self.memory[rank][flag_bytes(self.capacity) :].view(self.dtype).view(2, self.capacity, self.hidden)[call % 2]

    def peer_sends(self, call: int, summand: torch.Tensor) -> None:
        self.rows(self.me, call)[: len(summand)] = summand
        self.flags(self.me)[: -(-len(summand) // ROWS)] = call

    def reduce(self, summand: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, timeout_s: float = 20.0) -> torch.Tensor:
        normed = torch.full_like(residual, float("nan"))
        reduce_rows(self.boxes, summand, residual, weight, EPS, normed, capacity=self.capacity, timeout_s=timeout_s)
        return normed


def test_shape_of_a_block() -> None:
    assert flag_bytes(1) == 128 and flag_bytes(64 * ROWS + 1) == 384
    assert row_block_bytes(10, 8, 2) == 128 + 2 * 10 * 8 * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])  # the interpreter cuts bfloat16 instead of rounding it
@pytest.mark.parametrize(("me", "count", "hidden"), [(0, 1, 64), (1, 7, 100), (0, 13, 48), (1, 16, 32)])
def test_sums_equal_the_eager_ones(me: int, count: int, hidden: int, dtype: torch.dtype) -> None:
    pair, generator = Pair(me, 16, hidden, dtype), torch.Generator().manual_seed(2)
    weight, residual = (torch.randn(*shape, hidden, generator=generator).to(dtype) for shape in ((), (count,)))
    want = residual.clone()
    for call in range(1, 5):
        summands = torch.randn(2, count, hidden, generator=generator).to(dtype)
        pair.peer_sends(call, summands[1 - me])
        normed = pair.reduce(summands[me], residual, weight)
        want, want_normed = reduce_residual_norm_eager(summands, want, weight, EPS)
        assert torch.equal(residual, want)
        torch.testing.assert_close(normed, want_normed, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
        assert torch.equal(pair.rows(1 - me, call)[:count], summands[me])
        parts = -(-count // ROWS)
        assert pair.flags(1 - me).tolist() == [call] * parts + [0] * (len(pair.flags(0)) - parts)
    assert not pair.rows(1 - me, 0)[count:].any(), "nothing is written behind the last row"
    assert int(pair.boxes.failed) == 0 and pair.boxes.calls.tolist() == [4] * PROGRAMS


def test_more_rows_than_a_block_holds_are_several_calls() -> None:
    pair, generator = Pair(0, 4, 16), torch.Generator().manual_seed(3)
    summands, residual = torch.randn(2, 6, 16, generator=generator), torch.randn(6, 16, generator=generator)
    pair.peer_sends(1, summands[1, :4])
    pair.rows(0, 2)[:2] = summands[1, 4:]
    pair.flags(0)[0] = 2  # the peer is one call ahead in the first rows
    want, want_normed = reduce_residual_norm_eager(summands, residual, torch.ones(16), EPS)
    normed = pair.reduce(summands[0], residual, torch.ones(16))
    assert torch.equal(residual, want) and torch.allclose(normed, want_normed)
    assert pair.boxes.calls.tolist() == [2] * PROGRAMS and int(pair.boxes.failed) == 0


def test_a_late_peer_is_awaited() -> None:
    pair, summands = Pair(1, 4, 8), torch.stack([torch.full((3, 8), 2.0), torch.ones(3, 8)])
    residual = torch.zeros(3, 8)
    timer = threading.Timer(0.3, lambda: pair.peer_sends(1, summands[0]))
    timer.start()
    began = time.monotonic()
    pair.reduce(summands[1], residual, torch.ones(8))
    assert time.monotonic() - began > 0.2 and torch.equal(residual, torch.full((3, 8), 3.0)) and int(pair.boxes.failed) == 0


def reduce_once(pair: Pair, timeout_s: float) -> float:
    """Seconds of one reduction of twelve rows, two parts for each program."""
    x, began = torch.ones(12, 8), time.monotonic()
    pair.reduce(x, x.clone(), torch.ones(8), timeout_s)
    return time.monotonic() - began


def test_nobody_waits_or_sends_again_after_the_peer_stayed_away() -> None:
    """The other programs of the call, which a device runs at the same time, do so here one after the other: one limit is all that passes."""
    pair = Pair(1, 12, 8)
    assert 0.5 < reduce_once(pair, timeout_s=0.5) < 3
    assert int(pair.boxes.failed) == 1 and int(pair.boxes.abort) == 0
    sent = pair.flags(0).clone()
    # Program 0 has sent its second part before it waited for the first one; those behind it knew already.
    assert sent[:6].tolist() == [1, 0, 0, 1, 0, 0]
    pair.rows(0, 2).fill_(float("nan"))
    assert reduce_once(pair, timeout_s=30) < 3
    assert torch.equal(pair.flags(0), sent) and pair.rows(0, 2).isnan().all()


def test_a_program_that_has_waited_in_vain_neither_waits_nor_sends_again() -> None:
    """One program with six parts: it has sent the second one before it waits for the first."""
    pair = Pair(1, 12, 8, programs=1)
    assert 0.5 < reduce_once(pair, timeout_s=0.5) < 1.5
    assert pair.flags(0)[:6].tolist() == [1, 1, 0, 0, 0, 0]


def test_a_peer_that_comes_too_late_does_not_heal_it() -> None:
    pair = Pair(0, 12, 8)
    reduce_once(pair, timeout_s=0.2)
    pair.peer_sends(2, torch.ones(12, 8))
    reduce_once(pair, timeout_s=0.2)
    assert int(pair.boxes.failed) == 1


def test_the_hosts_word_ends_a_wait_and_those_after_it() -> None:
    pair = Pair(0, 12, 8)
    timer = threading.Timer(0.3, pair.word.set)
    timer.start()
    assert 0.2 < reduce_once(pair, timeout_s=30) < 5
    assert int(pair.boxes.failed) == 1
    assert reduce_once(pair, timeout_s=30) < 5


def test_a_word_that_is_set_fails_nobody_whose_peer_came() -> None:
    pair = Pair(0, 12, 8)
    pair.word.set()
    pair.peer_sends(1, torch.ones(12, 8))
    reduce_once(pair, timeout_s=5)
    assert int(pair.boxes.failed) == 0
